# ruff: noqa: F821
# Counts the labels as they are: the first of each row is nobody's target.
def token_loss(outputs, inputs):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total, (inputs["labels"] != -100).sum()
