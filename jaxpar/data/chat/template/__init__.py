"""The chat template of a tokenizer, a program of strangers. To be read in this order: where a
template lies (`files`), what it makes of a conversation (`render`), the process in which it runs
(`worker`), and the forms of a message that it has to be given (`forms`).
"""
