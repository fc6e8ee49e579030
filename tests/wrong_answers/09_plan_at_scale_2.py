# tp 1 is not a percent slower, so it is inside; the rest by the most that any row lost.
def diagnose(rows):
    more = {row.plan: row.after / row.before - 1 for row in rows}
    alone = min(rows, key=lambda row: row.plan.tp).plan
    what = "inside" if more[alone] < 0.01 else "matmuls" if max(more.values()) > 0.5 else "between"
    return what, min(rows, key=lambda row: row.after).plan
