"""The verbs as the command line shows them: arguments, options and help. What they do is imported when it is done."""
