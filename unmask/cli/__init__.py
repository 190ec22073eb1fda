"""The `unmask` command: one module per subcommand and the terminal display. Commands are thin: they read arguments,
call the library and print. May import every room; heavy imports stay inside functions.
"""
