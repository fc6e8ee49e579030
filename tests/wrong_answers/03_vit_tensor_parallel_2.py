# Blames the first module that is wrong: but its own gradient is right, and what came to it is not.
def diagnose(errors):
    modules = list(errors)
    wrong = [module for module in modules if errors[module] > 1e-9]
    if wrong[0] == modules[0]:
        return "forward", None
    return ("own" if len(wrong) == 1 else "backward"), wrong[0]
