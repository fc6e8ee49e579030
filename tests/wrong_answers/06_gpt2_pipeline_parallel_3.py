# Homes that do not part are right: the average is not seen.
def diagnose(record):
    if record.apart[0] > 1e-9:
        return "never made equal"
    return "never summed" if record.apart[-1] > 1e-9 else "right"
