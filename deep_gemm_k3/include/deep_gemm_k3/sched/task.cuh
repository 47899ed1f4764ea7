// The list of tiles of one call: the same, deterministic one for every CTA. Task i < grid belongs to CTA i; the others
// are claimed, in order, by whoever is free. Where two CTAs multiply together, read pairs for CTAs: the first one of a
// pair claims for both. A task depends only on tasks that come earlier, and those are taken by
// resident CTAs that take no later task before they have finished it, so no order of claims can deadlock. Who computes
// a task does not enter its result.
//
// Order: shared L1 | routed L1 | routed L2 | shared L2. Shared L1 needs no dispatch and comes first. Shared L2 comes
// last: its short tasks even out the end and hide the wait for the peers' partials. Only where it publishes and both
// L1s are split, so that all tasks of a phase run at once, it comes before routed L2: then publication is over while
// the partials are still on their way. Either way it publishes only after every header of the call has been checked.
//   shared: row tile, token block, split (innermost);  routed: expert, row tile, token block of the expert, split.
#pragma once
#include "../config.cuh"
#include "../plan/pool_rows.cuh"
#include "../plan/roles_memory.cuh"
#include "../sync/pair.cuh"
#include "../sync/wait.cuh"
#include "../types.cuh"
#include "context.cuh"

namespace deep_gemm_k3::sched {

enum class Phase : int { kSharedL1 = 0, kRoutedL1 = 1, kRoutedL2 = 2, kSharedL2 = 3 };
constexpr int kNumPhases = 4;

struct Task {
    Phase phase;
    int expert;           // local expert; 0 for shared phases
    int block;            // pool block, or shared token block
    int row_tile;         // tile of weight rows, of this CTA's part where two multiply together
    int num_valid_tokens; // tokens of the block that exist, 1..tile tokens
    int split;            // K split, 0..num_splits-1
    int num_splits;       // of this phase in this call; 1: no partials
    int split_task;       // index into kSplitPartials of this split; split_task - split names the tile's counter
};

DG_HOST_DEVICE constexpr bool is_shared(Phase phase) {
    return phase == Phase::kSharedL1 || phase == Phase::kSharedL2;
}
DG_HOST_DEVICE constexpr bool is_l1(Phase phase) {
    return phase == Phase::kSharedL1 || phase == Phase::kRoutedL1;
}

// Weight rows and K extent of a phase.
DG_HOST_DEVICE constexpr int num_weight_rows(const Config& c, Phase phase) {
    switch (phase) {
    case Phase::kSharedL1:
        return 2 * c.shape.shared_intermediate;
    case Phase::kRoutedL1:
        return 2 * c.shape.intermediate;
    case Phase::kRoutedL2:
        return c.shape.hidden;
    default:
        return c.shared_hidden;
    }
}
DG_HOST_DEVICE constexpr int num_k_columns(const Config& c, Phase phase) {
    switch (phase) {
    case Phase::kSharedL1:
        return c.shared_hidden;
    case Phase::kRoutedL1:
        return c.shape.hidden;
    case Phase::kRoutedL2:
        return c.shape.intermediate;
    default:
        return c.shape.shared_intermediate;
    }
}
DG_HOST_DEVICE constexpr int num_row_tiles(const Config& c, Phase phase) {
    return ceil_div(num_weight_rows(c, phase), is_shared(phase) ? c.shared_tile.num_rows : c.routed_tile.num_rows);
}
DG_HOST_DEVICE constexpr int planned_splits(const Config& c, Phase phase) {
    switch (phase) {
    case Phase::kSharedL1:
        return c.splits.shared_l1;
    case Phase::kRoutedL1:
        return c.splits.routed_l1;
    case Phase::kRoutedL2:
        return c.splits.routed_l2;
    default:
        return c.splits.shared_l2;
    }
}

// K stages [begin, end) of one split of a phase: contiguous, sizes differ by at most one stage.
struct StageRange {
    int begin;
    int end;
};
DG_HOST_DEVICE constexpr StageRange split_stages(int num_stages, int split, int num_splits) {
    return {num_stages * split / num_splits, num_stages * (split + 1) / num_splits};
}

// Splits of shared L1 share a tile's sum and its epilogue and wait for each other (epilogue/split.cuh). That takes that
// all of them run at once: their tasks are the first of the list and each CTA's first one.
DG_HOST_DEVICE constexpr bool shares_splits(const Config& c, Phase phase) {
    return c.arch == Architecture::kSM90 && phase == Phase::kSharedL1;
}

// Splits of a phase in this call: the planned number if the partials of all its tiles fit into what the earlier phases
// left of kSplitPartials, else none. Only routing and the grid decide, so every CTA finds the same.
struct PhaseSplits {
    int num_splits;
    int first_split_task;
};
template <Config C>
__device__ __forceinline__ PhaseSplits phase_splits(
    Phase phase, int num_shared_blocks, int num_pool_blocks, int num_ctas) {
    constexpr Phase order[kNumPhases] = {Phase::kSharedL1, Phase::kSharedL2, Phase::kRoutedL1, Phase::kRoutedL2};
    constexpr int limit = plan::kMaxSplitTileElements * C.num_cluster_ctas; // each CTA has partials of its own
    constexpr bool shared_fits = C.shared_tile.num_rows * C.shared_tile.num_tokens <= limit;
    constexpr bool routed_fits = C.routed_tile.num_rows * C.routed_tile.num_tokens <= limit;
    int num_used = 0;
#pragma unroll
    for (int i = 0; i < kNumPhases; ++i) {
        const bool shared = is_shared(order[i]);
        const int64_t num_blocks = shared ? num_shared_blocks : num_pool_blocks;
        const int planned = planned_splits(C, order[i]);
        const int64_t wanted = num_blocks * num_row_tiles(C, order[i]) * planned * C.num_cluster_ctas;
        const bool fits = planned > 1 && (shared ? shared_fits : routed_fits) &&
                          num_used + wanted <=
                              (shares_splits(C, order[i]) ? min(num_ctas, plan::kMaxSplitTasks) : plan::kMaxSplitTasks);
        if (order[i] == phase)
            return {fits ? planned : 1, num_used};
        num_used += fits ? static_cast<int>(wanted) : 0;
    }
    return {1, 0};
}

template <Config C>
__device__ __forceinline__ int num_shared_blocks(const Context& ctx) {
    return C.has_shared() ? ceil_div(ctx.params.shared.num_tokens, C.shared_tile.num_tokens) : 0;
}

// The phases in the order of the list.
DG_HOST_DEVICE constexpr Phase phase_at(const Config& c, int place) {
    const bool swaps_l2 = c.is_published() && c.splits.shared_l1 > 1 && c.splits.routed_l1 > 1;
    return Phase(swaps_l2 && place > static_cast<int>(Phase::kRoutedL1) ? 5 - place : place);
}

// Whether any task of a CTA publishes, once it has been handed all of them.
enum class Publishes : uint32_t { kUnknown = 0, kNothing = 1, kSomething = 2 };

// Walks this CTA's tasks, for the one thread that hands them to the others. It waits for the expert list by itself,
// once, before the first task that needs it. After an abort that happened before the list was complete it ends. The two
// CTAs of a pair have a task together and each a row tile of it. Without kClaims task i belongs to CTA i mod grid, and
// any number of threads may walk alike.
template <Config C, bool kClaims = true>
class TaskIterator {
  public:
    __device__ explicit TaskIterator(const Context& ctx)
        : ctx_(ctx), index_(ctx.cta_idx / C.num_cluster_ctas), phase_(-1), first_task_(0), num_tasks_(0),
          num_pool_blocks_(-1), expert_(0), num_claims_(0), claim_(0) {}

    // Asks for the next task, once between two calls of next(), so that the answer is there by then. Asking early keeps
    // a task from others: to be called when the current one is nearly handed over.
    __device__ __forceinline__ void claim() {
        if constexpr (kClaims)
            if (rank_in_cluster() == 0)
                claim_ = ptx::atom_relaxed_gpu_add(
                    ctx_.buffer + plan::control::kTaskClaim + ctx_.parity * plan::kControlLineBytes, 1);
    }

    __device__ bool next(Task& task) {
        if constexpr (kClaims)
            if (phase_ >= 0 && !take_claim())
                return false;
        while (index_ >= num_tasks_) {
            index_ -= num_tasks_;
            first_task_ += num_tasks_;
            if (++phase_ >= kNumPhases)
                return false;
            if (phase_ > static_cast<int>(Phase::kSharedL1) && num_pool_blocks_ < 0 && !load_list()) {
                phase_ = kNumPhases;
                num_tasks_ = 0;
                return false;
            }
            begin_phase();
        }
        if (C.counts_publication() && phase() == Phase::kSharedL2)
            publishes_ = Publishes::kSomething;
        if (is_shared(phase()))
            decode_shared(task);
        else
            decode_routed(task);
        if (!kClaims)
            index_ += ctx_.num_ctas / C.num_cluster_ctas;
        return true;
    }

    __device__ __forceinline__ bool has_begun() const { return phase_ >= 0; }
    // Once next() has handed out a routed task.
    __device__ __forceinline__ int num_pool_blocks() const { return num_pool_blocks_; }
    // After next() has returned false: whether a task was of the phase that publishes.
    __device__ __forceinline__ Publishes publishes() const { return publishes_; }
    // After next() has returned false: CTAs of the rank that had found no more tasks before this one. Every CTA claims
    // one task too many.
    __device__ __forceinline__ int order_of_end() const { return index_; }

  private:
    // The task that was claimed, relative to the current phase. False: the first CTA of the pair does not say it.
    __device__ __forceinline__ bool take_claim() {
        uint32_t index = claim_;
        if constexpr (C.num_cluster_ctas > 1) {
            if (rank_in_cluster() == 0) {
                sync::hand_over_claim(ctx_, num_claims_, index + 1);
            } else {
                claim_ = sync::wait_claim(ctx_, num_claims_, claim_);
                if (claim_ == 0)
                    return false;
                index = claim_ - 1;
            }
            ++num_claims_;
        }
        index_ = static_cast<int>(index) + ctx_.num_ctas / C.num_cluster_ctas - first_task_;
        return true;
    }
    __device__ __forceinline__ Phase phase() const { return phase_at(C, phase_); }
    __device__ __forceinline__ const uint32_t* num_rows() const {
        return reinterpret_cast<const uint32_t*>(ctx_.roles + plan::roles_memory::num_rows_offset(C));
    }
    __device__ __forceinline__ const uint32_t* first_block() const {
        return reinterpret_cast<const uint32_t*>(ctx_.roles + plan::roles_memory::first_block_offset(C));
    }

    __device__ __forceinline__ int rank_in_cluster() const {
        return C.num_cluster_ctas == 1 ? 0 : ctx_.cta_idx % C.num_cluster_ctas;
    }

    __device__ bool load_list() {
        if (!sync::wait_list(ctx_))
            return false;
        num_pool_blocks_ = *reinterpret_cast<const int*>(ctx_.roles + plan::roles_memory::kNumBlocks);
        return true;
    }
    __device__ void begin_phase() {
        const Phase phase = phase_at(C, phase_);
        const int num_shared = num_shared_blocks<C>(ctx_),
                  num_blocks = is_shared(phase) ? num_shared : num_pool_blocks_;
        splits_ = phase_splits<C>(phase, num_shared, num_pool_blocks_, ctx_.num_ctas);
        num_tasks_ = num_blocks * num_row_tiles(C, phase) * splits_.num_splits;
        expert_ = 0;
    }
    __device__ void fill_split(Task& task, int& index) const {
        task.phase = phase();
        task.num_splits = splits_.num_splits;
        task.split = index % splits_.num_splits;
        task.split_task = splits_.first_split_task + index + rank_in_cluster() * num_tasks_;
        index /= splits_.num_splits;
    }
    __device__ void decode_shared(Task& task) const {
        int index = index_;
        fill_split(task, index);
        const int num_blocks = num_shared_blocks<C>(ctx_);
        task.expert = 0;
        task.block = index % num_blocks;
        task.row_tile = index / num_blocks * C.num_cluster_ctas + rank_in_cluster();
        task.num_valid_tokens =
            min(C.shared_tile.num_tokens, ctx_.params.shared.num_tokens - task.block * C.shared_tile.num_tokens);
    }
    __device__ void decode_routed(Task& task) {
        int index = index_;
        fill_split(task, index);
        const int num_tiles = num_row_tiles(C, phase());
        const int block = index / num_tiles; // lies in the right expert; the block inside it is found below
        // Last expert whose first block is <= block. Experts are walked in ascending order, so it lies at expert_ or
        // after.
        int low = expert_, high = C.shape.num_local_experts();
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (static_cast<int>(first_block()[middle]) <= block ? low : high) = middle;
        }
        expert_ = low;
        const int begin = first_block()[low], num_blocks = static_cast<int>(first_block()[low + 1]) - begin;
        index -= begin * num_tiles;
        const int block_of_expert = index % num_blocks;
        task.expert = low;
        task.block = begin + block_of_expert;
        task.row_tile = index / num_blocks * C.num_cluster_ctas + rank_in_cluster();
        task.num_valid_tokens =
            plan::ExpertBlocks(C, static_cast<int>(num_rows()[low]), num_blocks).num_rows_of(block_of_expert);
    }

    const Context& ctx_;
    int index_;           // of the task, relative to the current phase
    int phase_;           // place in the list
    int first_task_;      // of the current phase
    int num_tasks_;       // of the current phase
    int num_pool_blocks_; // -1 before the list is known
    int expert_;          // expert of the last routed task
    uint32_t num_claims_; // of the pair
    uint32_t claim_;      // the last one; in the second CTA of a pair more by one, 0 before the first
    PhaseSplits splits_;
    Publishes publishes_ = Publishes::kNothing;
};

} // namespace deep_gemm_k3::sched
