def small(c): pass
def prompt(c): pass
def bodies(c): pass
