"""The machine: cores, exact arithmetic, memory, and files that are kept."""
