"""The reader's guesses: asked for, revealed beside what was measured, and scored."""
