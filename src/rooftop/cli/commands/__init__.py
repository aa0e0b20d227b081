"""The verbs of the command line: arguments, options and help. A verb imports the code for its work when it runs."""
