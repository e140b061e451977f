"""``baton doctor``: whether what `baton serve` would start with the same options can work well on this
machine, and what to do where it cannot.

    findings   what a check has to say
    machine    processor, cores, memory, limits, GPUs
    plan       options, model, ports, who gets which cores
    links      how fast blocks get from each prefill to each decode worker, by each transport
    server     a server that runs: is it ready, are its workers well, how far is its clock off
"""
