"""The two forms of a program. To be read in this order: the typed data of a compiled module
(`module`), which `parse` makes of its text, by brackets and quotes (`text`); what the text says of
arrays in one place (`aliases`); the tasks that a module is made into (`tasks`); what an opcode
means for tasks (`opcodes`); and whether two texts are of one program (`digest`).
"""
