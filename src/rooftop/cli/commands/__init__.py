"""The verbs of the command line: arguments, options and help. The code that does their work is imported when they
run.
"""
