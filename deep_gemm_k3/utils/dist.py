"""Set-up of torch.distributed with upstream's meaning."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from .. import envs
from ..arguments import check_int

MAX_RANKS = 2**16


def init_dist(local_rank: int, num_local_ranks: int) -> tuple[int, int, dist.ProcessGroup]:
    """Join the default process group; returns this process's rank, the world size, and a group of all ranks.

    Call it in each of `num_local_ranks` processes of every node. Address and port of rank 0's store, the number of nodes
    and this node's number come from MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK. With a CUDA device per local rank the
    backend is NCCL and the device of that number becomes the current one, and CUDA torch's default device; without CUDA it
    is gloo. Either way BF16 becomes torch's default dtype, on which callers of upstream's function rely. A variable that
    cannot hold is named by `envs.EnvironmentValueError`, a ValueError, before anything is set or waited for.
    """
    num_local_ranks = check_int("num_local_ranks", num_local_ranks, 1, MAX_RANKS)
    local_rank = check_int("local_rank", local_rank, 0, num_local_ranks - 1)
    on_cuda = torch.cuda.is_available()
    if on_cuda and torch.cuda.device_count() < num_local_ranks:
        raise ValueError(
            f"num_local_ranks: wanted at most one per CUDA device ({torch.cuda.device_count()}), given "
            f"{num_local_ranks}; several ranks on one device are a local world"
        )
    port, num_nodes, node = envs.MASTER_PORT.get(), envs.WORLD_SIZE.get(), envs.RANK.get()
    if node >= num_nodes:
        raise envs.EnvironmentValueError(
            f"RANK: wanted a node's number below WORLD_SIZE, which is {num_nodes}, given {node}"
        )
    if num_nodes * num_local_ranks > MAX_RANKS:
        raise envs.EnvironmentValueError(
            f"WORLD_SIZE: wanted at most {MAX_RANKS} ranks on all nodes, given {num_nodes} nodes of {num_local_ranks}"
        )
    device = torch.device("cuda", local_rank) if on_cuda else None
    if device is not None:
        torch.cuda.set_device(device)
        torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    dist.init_process_group(
        backend="nccl" if on_cuda else "gloo",
        init_method=f"tcp://{envs.MASTER_ADDR.get()}:{port}",
        world_size=num_nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
        timeout=timedelta(seconds=envs.TIMEOUT_S.get()),
        device_id=device,
    )
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(num_nodes * num_local_ranks)))
