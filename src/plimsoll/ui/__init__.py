"""Shows artifacts (saved results, such as plans) to people: the command line, renderers for terminals and HTML pages, the
demo.
"""
