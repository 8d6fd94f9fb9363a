"""The work of one instruction. To be read in this order: what it computes (`flops`), what it reads
and writes (`memory_traffic`), which kind of task it is by these (`kinds`), what the host computes
for it (`host_compute`), its elements one by one on a CPU (`vector_work`), what it sends between
which devices (`collectives`), and how often the loop around it runs (`trips`).
"""
