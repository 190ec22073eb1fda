"""The parts inside other people's trainers. Nothing here is imported unless it is asked for by name."""
