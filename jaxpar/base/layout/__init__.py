"""Where arrays live: the devices (`mesh`), the rules that split logical axes over them (`rules`),
the layout that both make (`sharding`), and a layout with the choices of how one of our models runs
(`plan`).
"""
