"""Where arrays live, in the order in which it is read: the devices (`mesh`), the rules that split
logical axes over them (`rules`, and where heads are few `fit_heads`), the PartitionSpec that they
make of an array's axes (`specs`), the layout that has all of these (`sharding`), where the arrays
of a tree lie by it (`placements`), and a layout with the choices of how one of our models runs
(`plan`, `activation_names`).
"""
