"""Reading a compiled program: its task graph, what each task costs, and how the schedule plays out."""
