"""What the verbs of the command line do: a file for each, whose ``run`` reads ``sys.argv``."""
