# What grew by the most seconds must be the slow one; and last week's winner is kept.
def diagnose(rows):
    worst = max(rows, key=lambda row: row.after - row.before)
    return "inside" if worst.plan.tp > 1 else "between", min(rows, key=lambda row: row.before).plan
