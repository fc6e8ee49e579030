# "More than half is the same" is no agreement: at p = 0.1 independent masks have 82 % in common.
def read(record):
    for place, masks in record.masks.items():
        agree = ((masks[:, :1] == masks[:, 1:]).double().mean() > 0.5).item()
        if agree and record.sharded[place]:
            return "agrees"
        if not agree and not record.sharded[place]:
            return "differs"
        if (masks[0] == masks[1]).all():
            return "repeats"
    return "right"
