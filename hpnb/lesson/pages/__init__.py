"""Commands that run, clean, pair and commit notebooks (no notebook imports them), and how a page is written.

A page is `notebooks/NN_name.py`. Its cells hold the experiment; `lesson.show` makes figures, tables and alt
texts; its prose describes the committed run, and the run writes the numbers.

    # %% [markdown]
    # ## 1F1B buys memory, not time
    # On {{02.hardware}} GPipe took {{02.ran.gpipe.makespan}} and 1F1B {{02.ran.1f1b.makespan}}. They idle
    # equally long, because the first and the last microbatch still walk through all stages alone.

    # %%
    lesson.predict("02.flight", "How many microbatches does rank 0 keep under 1F1B?", unit="microbatches",
                   kind="identity", rule_of_thumb=M)

    # %%
    ran = {name: pool.run(time_schedule, name)[0] for name in ("gpipe", "1f1b")}  # {name: Timeline}
    lesson.show(ran, in_flight=True, key="02.ran", title=f"GPipe keeps {M} microbatches, 1F1B {N}")
    kept = {name: tl.peak_in_flight(0) for name, tl in ran.items()}
    lesson.reveal("02.flight", kept["1f1b"], predicted=N, source="counted")
    lesson.claim("1F1B keeps fewer microbatches than GPipe", (kept["1f1b"], "<", kept["gpipe"]))
    lesson.show(predicted=simulated, measured=ran, unit="s", key="02.steps", title="No schedule is faster")

    python -m hpnb.lesson.pages.committed notebooks/02_vit_pipeline_parallel.py         # run, fill, stamp
    python -m hpnb.lesson.pages.committed --pair notebooks/02_vit_pipeline_parallel.py  # prose only: fill

Numbers. Write {{key}} in the prose, or {{key:.2f}} for the bare number. The tool turns it into
<data value="key">304 ms</data>, which reads "304 ms" on GitHub and in JupyterLab, and corrects it at every
fill; a test fails where prose and run disagree. `lesson.record(key, value, unit)` takes a number, a name, a
mapping of them, a Timeline (.makespan .bubble .in-flight), a MemoryProfile (.peak, .activations, ...) or
Traffic (.dp, .total). `show(..., key=)` and `reveal` record what they show: 02.steps.gpipe.measured,
02.flight, 02.flight.predicted, 02.flight.rule-of-thumb. A key is the page's number, a dot and a name in
small letters, and any page may use it. NN.hardware is there by itself.

A directional statement is a `lesson.claim`. What is shown is a `lesson.show`, and its title is the finding.
Each `predict` has a `rule_of_thumb`, so that a committed page has no gap. Docstrings say what they take.
Never format a number, build a table or write an alt text in a cell.

tests/notebook_rules.py and tests/retold_rules.py have the rules that a page keeps.
"""
