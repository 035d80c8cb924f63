"""The process group, data parallelism, sharding, and what is sent."""

import torch.distributed as dist

if dist.is_available():
    # The default arguments of its functions are the default group of the time of its import. Were
    # it imported later (the first step of an optimizer of torch's does so), they would keep the
    # group and gloo's threads alive after destroy_process_group(), and such a thread may abort
    # the process while the interpreter ends.
    import torch.distributed.nn.functional  # noqa: F401
