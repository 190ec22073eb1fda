"""`unmask train --dry-run`: passes, memory and hours of a run, computed before anything is loaded."""
