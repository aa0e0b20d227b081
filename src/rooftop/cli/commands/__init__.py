"""The verbs as the command line shows them: arguments, options and help. Their work is imported when they run."""
