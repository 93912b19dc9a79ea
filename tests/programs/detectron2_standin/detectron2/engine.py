"""detectron2.engine.launch, as documented: start the processes of this machine, form the group."""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from detectron2.utils import comm


def launch(
    main_func,
    num_gpus_per_machine,
    num_machines=1,
    machine_rank=0,
    dist_url=None,
    args=(),
    timeout=timedelta(minutes=30),
):
    """Run main_func(*args) in num_gpus_per_machine processes. A single process is this one."""
    world_size = num_machines * num_gpus_per_machine
    if world_size == 1:
        main_func(*args)
        return
    if dist_url == "auto":
        with socket.create_server(("127.0.0.1", 0)) as server:
            dist_url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    first_rank = machine_rank * num_gpus_per_machine
    job = (main_func, args, world_size, num_gpus_per_machine, first_rank, dist_url, timeout)
    mp.spawn(_worker, job, num_gpus_per_machine)


def _worker(local_rank, main_func, args, world_size, per_machine, first_rank, dist_url, timeout):
    has_gpu = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=dist_url,
        rank=first_rank + local_rank,
        world_size=world_size,
        timeout=timeout,
    )
    comm.create_local_process_group(per_machine)
    if has_gpu:
        torch.cuda.set_device(local_rank)
    comm.synchronize()
    main_func(*args)
