"""Tables and figures from plain rows."""
