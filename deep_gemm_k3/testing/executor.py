"""Execution of one rank's part of a fused call on the CPU, with the oracle's arithmetic.

The host library validates a call, plans it and hands this module one JSON object, the launch record. Every tensor in it
is given by its address in this process, so the executor sees exactly the memory that a kernel would see: this rank's own
tensors and the symmetric buffers of all ranks.

Launch record (version 1)::

    {
      "version": 1,
      "entry":  "fp8_fp4_mega_moe" | "fp8_fp4_mega_moe_bf16_shared"
                | "fp8_fp4_mega_moe_bf16_shared_rs" | "fp8_fp4_mega_moe_bf16_shared_sp_rs",
      "handle": int,                 # of the symmetric buffer; first argument of cpu_barrier
      "rank": int, "num_ranks": int,
      "problem": {"num_experts": int, "num_topk": int, "num_max_tokens_per_rank": int,
                  "hidden": int, "intermediate_hidden": int},
      "tensors": {name: [address, dtype, shape]},        # contiguous; dtype as torch names it, without "torch."
      "scalars": {"num_tokens": int, "num_shared_tokens": int,
                  "activation": "swiglu" | "situ", "activation_clamp": float | null,
                  "situ_beta": float | null, "situ_linear_beta": float | null,
                  "rms_epsilon": float | null, "fast_math": bool, "batch_invariant": bool},
      "peers":  [address, ...],      # base of every rank's symmetric buffer, mapped into this process, in rank order
      "layout": {"x": offset, "x_sf": offset, "topk_idx": offset, "topk_weights": offset,
                 "combine": offset, "header": offset},   # bytes from a base; equal on all ranks
      "plan":   {...}                # not read here
    }

Tensor names; those an entry has no use for are absent (or null), never empty placeholders::

    y                    bfloat16 [num_tokens, hidden]
    l1_weights           routed, transformed for any target (the target is recognised by dtype and shape)
    l1_weights_sf        its scale partner (may have zero elements: then the address is not read)
    l2_weights, l2_weights_sf
    cumulative_local_expert_recv_stats   int32 [E_local], optional
    shared_x             bfloat16 [num_shared_tokens, shared_hidden]
    shared_l1_weights    bfloat16 [2 * shared_intermediate, shared_hidden]
    shared_l2_weights    bfloat16 [shared_hidden, shared_intermediate]
    rms_weight           bfloat16 [hidden]
    shared_y             bfloat16 [num_shared_tokens, shared_hidden]; the dense entry only
    shared_rs_workspace  bfloat16 [generations, tokens, ranks, columns]; publication entries only, like the next two
    shared_rs_flags      int32 [>= 9]
    shared_rs_peer_ptrs  int64 [ranks]

Regions of the symmetric buffer, T = num_max_tokens_per_rank::

    x             float8_e4m3fn [T, hidden]
    x_sf          int32 [T, hidden / 128], four UE8M0 bytes each, K-major
    topk_idx      int64 [T, num_topk]
    topk_weights  float32 [T, num_topk]
    combine       bfloat16 [T, num_topk, hidden], written by the ranks that own the experts
    header        128 bytes at any 16-byte aligned place that the executor alone uses; contents need not survive a call

Order of one call; ``cpu_barrier(handle, phase)`` is ``torch.ops.deep_gemm_k3.cpu_barrier``, joined by every rank, with
release/acquire meaning, releasing the GIL, raising on time-out or when a peer has aborted::

    write own header                       peers may not read it yet
    barrier phase 0                        every rank's inputs and header are in place
    check headers and expert ids           all ranks read the same data and so reach the same verdict
    routed partials -> combine slots of the source ranks; shared expert -> shared_y or the peers' workspaces; statistics
    barrier phase 1                        all partials and publications are visible; all inputs may be overwritten
    combine own tokens, RMSNorm -> y

Two barriers are enough: a rank writes its next header, partials or publication only after phase 0 of the next call, which
this rank joins after it has combined.

``run`` returns nothing. It raises ``RuntimeError`` with a message for the caller; the host library then marks the buffer
as aborted, which also wakes the peers that wait in a barrier.
"""
