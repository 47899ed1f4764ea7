#include "config.hpp"

#include "deep_gemm_k3/plan/pool_rows.cuh"
#include "deep_gemm_k3/plan/shared_memory.cuh"
#include "deep_gemm_k3/plan/workspace.cuh"
#include "describe.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <span>
#include <string>
#include <tuple>

namespace deep_gemm_k3::heuristics {

namespace {

constexpr int kNumThreads = 384;
constexpr int kNumThreadsSM100 = kNumThreads + 32; // a warp that issues multiplications
constexpr int kNumMathWarpgroups = 2;
constexpr int kMaxSplits = 16;
constexpr int kMinUnitsPerSplit = 3; // k128 units; fewer do not fill the pipeline once
constexpr int kMaxStages = 8;
// Tiles of the batch-invariant mode: one path for every token count, a compromise between decode and prefill.
constexpr int kInvariantRoutedTokens = 32;
constexpr int kInvariantSharedTokens = 64;

// One GEMM pair (L1 and L2) as the split heuristic sees it. Tile counts saturate at `kMany`.
struct Load {
    TileShape tile;
    int num_l1_tiles = 0;
    int num_l2_tiles = 0;
    NarrowWidths narrow_widths = {0, 0};

    auto key() const {
        return std::tuple(
            tile.num_rows, tile.num_tokens, narrow_widths.middle, narrow_widths.least, num_l1_tiles, num_l2_tiles);
    }
    auto operator<=>(const Load& other) const { return key() <=> other.key(); }
};
constexpr int kMany = 2048; // more than any device has CTAs

int saturated_product(int64_t a, int64_t b) {
    return static_cast<int>(std::min<int64_t>(a * b, kMany));
}

// A routed tile and the narrower widths of its mainloops: those that the assembler finds registers for.
struct TileWidths {
    int num_tokens;
    NarrowWidths narrow;
};
constexpr TileWidths kTilesOfMany[] = {
    {48, {40, 32}}, {72, {56, 48}}, {88, {80, 72}}, {104, {88, 80}}, {160, {144, 112}}, {160, {144, 88}}};
constexpr TileWidths kTileOfFew = {16, {8, 8}}; // where two CTAs share an SM: mma.sync multiplies the narrower width
constexpr int kWidestTile = 160;                // leaves no registers for the activation in exact math

// Tokens that an expert multiplies in tiles of many, in expectation, its number of rows being about normal with its
// mean as variance. Each block, whose weights are dequantised for it alone, costs as much again as kBlockCost tokens.
double expected_cost_of_expert(double mean, const TileWidths& tile) {
    constexpr double kBlockCost = 32, kStep = 0.25, kMost = 4; // the last two in standard deviations
    Config config{};
    config.routed_tile.num_tokens = tile.num_tokens;
    config.narrow_widths = tile.narrow;
    double cost = 0, weights = 0;
    for (double z = -kMost; z <= kMost; z += kStep) {
        const double weight = std::exp(-z * z / 2), rows = std::ceil(std::max(1.0, mean + z * std::sqrt(mean)));
        const int num_blocks = static_cast<int>(std::ceil(rows / tile.num_tokens));
        const plan::ExpertBlocks blocks(config, static_cast<int>(rows), num_blocks);
        cost += weight * (blocks.num_places() + num_blocks * kBlockCost);
        weights += weight;
    }
    return cost / weights;
}

// Of the tiles for many rows the one that multiplies least; of nearly equal ones the first, which is the narrowest.
// `num_tokens`: only of those of as many, if there are any.
TileWidths tile_for_many(double mean, bool fast_math, int num_tokens = 0) {
    constexpr double kWorthwhile = 0.99;
    TileWidths best{.num_tokens = num_tokens, .narrow = {0, 0}};
    double least_cost = 0;
    for (const TileWidths& tile : kTilesOfMany) {
        if (num_tokens != 0 ? tile.num_tokens != num_tokens : tile.num_tokens == kWidestTile && !fast_math)
            continue;
        const double cost = expected_cost_of_expert(mean, tile);
        if (best.narrow.least == 0 || cost < kWorthwhile * least_cost) {
            best = tile;
            least_cost = cost;
        }
    }
    return best;
}

// Small tiles hold an expert's rows at the given mean in most cases: mean plus about two standard deviations.
int routed_tokens_for(Architecture arch, double mean, bool fast_math) {
    struct Step {
        double mean;
        int num_tokens;
    };
    static constexpr Step kSM90[] = {{4.8, 8}, {10, 16}, {22, 32}};
    static constexpr Step kSM100[] = {{10, 16}, {22, 32}, {48, 64}, {76, 96}, {128, 128}};
    if (arch == Architecture::kSM100) {
        for (const Step& step : kSM100)
            if (mean <= step.mean)
                return step.num_tokens;
        return 192;
    }
    for (const Step& step : kSM90)
        if (mean <= step.mean)
            return step.num_tokens;
    return tile_for_many(mean, fast_math).num_tokens;
}

int chosen(int override, int otherwise) {
    return override > 0 ? override : otherwise;
}

// Two CTAs share an SM only where the rank has the whole device: the hardware spreads a grid over as many SMs as it
// finds, so on a part of the device it would take the SMs on which the ranks that it waits for have to start.
int ctas_per_sm(const Problem& problem, const DeviceFacts& device, const TileShape& routed_tile) {
    const bool fits_two = device.arch == Architecture::kSM90 && device.is_whole && routed_tile.num_tokens <= 32;
    return chosen(problem.overrides.num_ctas_per_sm, fits_two ? 2 : 1);
}

// On SM100 two CTAs multiply a tile together where the grid is even: each needs half of the tokens' bytes.
int cluster_ctas(const Problem& problem, const DeviceFacts& device) {
    const bool pairs = device.arch == Architecture::kSM100 && device.num_sms % 2 == 0;
    return pairs ? chosen(problem.overrides.num_cluster_ctas, 2) : 1;
}

// Non-empty experts of this rank, in expectation over uniform routing.
double expected_blocks(const Problem& problem, int tile_tokens) {
    const double experts = std::max(problem.shape.num_experts, 1);
    const double routes = double(problem.num_tokens) * problem.shape.num_ranks * problem.shape.num_topk;
    const double non_empty = 1.0 - std::pow(1.0 - 1.0 / experts, routes);
    const double local = std::max(problem.shape.num_local_experts(), 1);
    const double blocks_per_expert = std::max(1.0, routes / experts / tile_tokens);
    return std::max(1.0, local * non_empty * blocks_per_expert);
}

Load routed_load(const Problem& problem, const DeviceFacts& device) {
    const double mean = expected_tokens_per_expert(problem);
    int tokens =
        problem.batch_invariant ? kInvariantRoutedTokens : routed_tokens_for(device.arch, mean, problem.fast_math);
    // Where every token goes to every expert there is nothing to expect: 8 rows are 8 rows.
    if (!problem.batch_invariant && problem.shape.num_experts <= problem.shape.num_topk && mean <= 16 &&
        device.arch == Architecture::kSM90)
        tokens = mean <= 8 ? 8 : 16;
    tokens = chosen(problem.overrides.routed_tokens, tokens);
    Load load{.tile = {.num_rows = 256 * cluster_ctas(problem, device), .num_tokens = tokens, .num_k = 128},
        .narrow_widths = problem.overrides.narrow_widths};
    if (device.arch == Architecture::kSM90 && load.narrow_widths.least == 0)
        load.narrow_widths = ctas_per_sm(problem, device, load.tile) == 1
                                 ? tile_for_many(mean, problem.fast_math, tokens).narrow
                                 : (tokens == kTileOfFew.num_tokens ? kTileOfFew.narrow : NarrowWidths{0, 0});
    const auto blocks = static_cast<int64_t>(std::min(std::ceil(expected_blocks(problem, tokens)), double(kMany)));
    load.num_l1_tiles = saturated_product(blocks, ceil_div(2 * problem.shape.intermediate, load.tile.num_rows));
    load.num_l2_tiles = saturated_product(blocks, ceil_div(problem.shape.hidden, load.tile.num_rows));
    return load;
}

// Block counts that the split heuristic tells apart: each one is a config to compile ahead of time.
int counted_blocks(int blocks) {
    if (blocks <= 2)
        return std::max(blocks, 1);
    return blocks <= 4 ? 4 : kMany;
}

// On SM100 tiles of up to 32 tokens may be split along K, and two fit into tensor memory side by side; larger ones read
// the weights less often.
int shared_tokens_for_sm100(int num_tokens) {
    if (num_tokens <= 16)
        return 16;
    return num_tokens <= 64 ? 32 : 128;
}

// On SM90 tiles of 256 rows read fewer operands, but their stages leave no memory to hand routed tiles over in; beside
// the widest of those, which have as large stages, they cost nothing.
int shared_rows(const Problem& problem, const DeviceFacts& device, const TileShape& routed_tile) {
    if (device.arch == Architecture::kSM100)
        return 256 * cluster_ctas(problem, device);
    const bool has_many = routed_tile.num_tokens > plan::kMaxExchangeTokens && problem.num_shared_tokens > 64;
    return chosen(problem.overrides.shared_rows, has_many ? 256 : 128);
}

Load shared_load(const Problem& problem, const DeviceFacts& device, const TileShape& routed_tile, int num_ctas_per_sm) {
    const bool is_sm100 = device.arch == Architecture::kSM100;
    Load load{.tile = {.num_rows = shared_rows(problem, device, routed_tile), .num_tokens = 0, .num_k = 64}};
    if (problem.shared_output == SharedOutput::kNone)
        return load;
    if (problem.batch_invariant)
        load.tile.num_tokens = kInvariantSharedTokens;
    else if (is_sm100)
        load.tile.num_tokens = shared_tokens_for_sm100(problem.num_shared_tokens);
    else if (num_ctas_per_sm > 1) // accumulators of 128 tokens do not fit beside a second CTA, nor many of both kinds
        load.tile.num_tokens = problem.num_shared_tokens <= 16 && routed_tile.num_tokens <= 16 ? 16 : 64;
    else
        load.tile.num_tokens = problem.num_shared_tokens <= 64 ? 64 : 128;
    load.tile.num_tokens = chosen(problem.overrides.shared_tokens, load.tile.num_tokens);
    const int blocks = counted_blocks(ceil_div(problem.num_shared_tokens, load.tile.num_tokens));
    load.num_l1_tiles = saturated_product(blocks, ceil_div(2 * problem.shape.shared_intermediate, load.tile.num_rows));
    load.num_l2_tiles = saturated_product(blocks, ceil_div(problem.shared_hidden, load.tile.num_rows));
    return load;
}

// One phase that may be cut along K.
struct Cut {
    TileShape tile;
    int num_tiles;
    int k;
    double task_bytes;      // weights one task streams
    int num_ctas;           // that work on a tile together
    double least_bytes = 0; // no split makes tasks of fewer: their sums would take longer than the weights
    int num_splits = 1;

    bool can_double() const {
        const int doubled = 2 * num_splits;
        return num_tiles > 0 && doubled <= kMaxSplits && k / 128 / doubled >= kMinUnitsPerSplit &&
               task_bytes / 2 >= least_bytes &&
               tile.num_rows / num_ctas * tile.num_tokens <= plan::kMaxSplitTileElements &&
               num_tiles * doubled * num_ctas <= plan::kMaxSplitTasks / 2;
    }
};

// Double the split count of whichever phase has the longest tasks while all tasks still start at once.
void balance(Cut& a, Cut& b, int num_ctas) {
    while (true) {
        Cut* longest = nullptr;
        for (Cut* cut : {&a, &b}) {
            const int total =
                a.num_tiles * a.num_splits + b.num_tiles * b.num_splits + cut->num_tiles * cut->num_splits;
            if (cut->can_double() && total * cut->num_ctas <= num_ctas &&
                (!longest || cut->task_bytes > longest->task_bytes))
                longest = cut;
        }
        if (!longest)
            return;
        longest->num_splits *= 2;
        longest->task_bytes /= 2;
    }
}

// The next larger divisor of the K units while all tasks still start at once: equal, shorter tasks.
void refine(Cut& cut, int num_other_tasks, int num_ctas) {
    const int num_units = cut.k / 128;
    for (int splits = cut.num_splits + 1; splits <= kMaxSplits && num_units / splits >= kMinUnitsPerSplit; ++splits) {
        const int num_tasks = cut.num_tiles * splits;
        if (num_units % splits != 0 || (num_tasks + num_other_tasks) * cut.num_ctas > num_ctas)
            continue;
        cut.task_bytes *= double(cut.num_splits) / splits;
        cut.num_splits = splits;
    }
}

struct Grid {
    int num_ctas;
    int ctas_per_tile;
};

// Halve the tasks of a phase that has few, until none takes longer than `task_bytes`: whoever has one of them would
// still be at it when the others have claimed everything else.
void shorten(Cut& cut, double task_bytes) {
    while (cut.can_double() && cut.task_bytes > task_bytes) {
        cut.num_splits *= 2;
        cut.task_bytes /= 2;
    }
}

SplitCounts choose_splits(const Problem& problem, const Load& routed, const Load& shared, const Grid& grid) {
    if (problem.batch_invariant)
        return {.routed_l1 = 1, .routed_l2 = 1, .shared_l1 = 1, .shared_l2 = 1};
    const BufferShape& shape = problem.shape;
    constexpr double kRoutedBytes = 0.53125, kSharedBytes = 2; // per weight
    const auto cut = [&](const Load& load, int num_tiles, int k, double bytes) {
        return Cut{.tile = load.tile,
            .num_tiles = num_tiles,
            .k = k,
            .task_bytes = bytes * load.tile.num_rows * k,
            .num_ctas = grid.ctas_per_tile};
    };
    Cut routed_l1 = cut(routed, routed.num_l1_tiles, shape.hidden, kRoutedBytes);
    Cut routed_l2 = cut(routed, routed.num_l2_tiles, shape.intermediate, kRoutedBytes);
    Cut shared_l1 = cut(shared, shared.num_l1_tiles, problem.shared_hidden, kSharedBytes);
    Cut shared_l2 = cut(shared, shared.num_l2_tiles, shape.shared_intermediate, kSharedBytes);
    if (grid.ctas_per_tile == 1)
        shared_l2.least_bytes = 128 << 10; // measured on SM90, as is what follows
    balance(routed_l1, shared_l1, grid.num_ctas);
    balance(routed_l2, shared_l2, grid.num_ctas);
    if (grid.ctas_per_tile == 1 && routed_l1.num_splits > 1)
        refine(routed_l1, shared_l1.num_tiles * shared_l1.num_splits, grid.num_ctas);
    // Worth its sums only beside several rounds of routed tasks, and not for several token blocks.
    const bool has_one_block = shared_l1.num_tiles == ceil_div(2 * shape.shared_intermediate, shared.tile.num_rows);
    if (grid.ctas_per_tile == 1 && shared.tile.num_rows == 128 && has_one_block &&
        routed_l1.num_tiles >= 4 * grid.num_ctas)
        shorten(shared_l1, routed_l1.task_bytes);
    const SplitCounts& wanted = problem.overrides.splits;
    return {.routed_l1 = chosen(wanted.routed_l1, routed_l1.num_splits),
        .routed_l2 = chosen(wanted.routed_l2, routed_l2.num_splits),
        .shared_l1 = chosen(wanted.shared_l1, shared_l1.num_splits),
        .shared_l2 = chosen(wanted.shared_l2, shared_l2.num_splits)};
}

Config combine(const Problem& problem, const DeviceFacts& device, const Load& routed, const Load& shared) {
    const int per_sm = ctas_per_sm(problem, device, routed.tile), per_tile = cluster_ctas(problem, device);
    Config config{.arch = device.arch,
        .shape = problem.shape,
        .shared_hidden = problem.shared_output == SharedOutput::kNone ? 0 : problem.shared_hidden,
        .activation = problem.activation,
        .shared_output = problem.shared_output,
        .has_clamp = problem.has_clamp,
        .fast_math = problem.fast_math,
        .has_rms_norm = problem.has_rms_norm,
        .has_statistics = problem.has_statistics,
        .routed_tile = routed.tile,
        .shared_tile = shared.tile,
        .splits = choose_splits(
            problem, routed, shared, {.num_ctas = std::max(device.num_sms, 1) * per_sm, .ctas_per_tile = per_tile}),
        .num_stages = 1,
        .num_math_warpgroups = kNumMathWarpgroups,
        .num_threads = device.arch == Architecture::kSM100 ? kNumThreadsSM100 : kNumThreads,
        .num_ctas_per_sm = per_sm,
        .num_cluster_ctas = per_tile,
        .narrow_widths = routed.narrow_widths};
    const bool has_one_expert = config.shape.num_local_experts() == 1; // of several any number may have rows
    const int most = has_one_expert && plan::has_few_stages(config) ? plan::kStagesOfSplits : kMaxStages;
    config.num_stages = chosen(problem.overrides.num_stages, std::clamp(plan::max_num_stages(config), 1, most));
    return config;
}

} // namespace

DeviceFacts default_device(Architecture arch) {
    return {.arch = arch, .num_sms = arch == Architecture::kSM90 ? 132 : 148};
}

double expected_tokens_per_expert(const Problem& problem) {
    const double routes = double(problem.num_tokens) * problem.shape.num_ranks * problem.shape.num_topk;
    return routes / std::max(problem.shape.num_experts, 1);
}

Config choose_config(const Problem& problem, const DeviceFacts& device) {
    const Load routed = routed_load(problem, device);
    return combine(
        problem, device, routed, shared_load(problem, device, routed.tile, ctas_per_sm(problem, device, routed.tile)));
}

std::vector<Config> all_configs(
    const Problem& problem, const DeviceFacts& device, int max_tokens, int max_shared_tokens) {
    Problem varied = problem;
    std::vector<Config> configs;
    std::set<std::string> seen_literals;
    std::set<Load> seen_routed;
    for (varied.num_tokens = 0; varied.num_tokens <= max_tokens; ++varied.num_tokens) {
        const Load routed = routed_load(varied, device);
        if (!seen_routed.insert(routed).second)
            continue;
        std::set<Load> seen_shared;
        const int last = problem.shared_output == SharedOutput::kNone ? 0 : max_shared_tokens;
        for (varied.num_shared_tokens = 0; varied.num_shared_tokens <= last; ++varied.num_shared_tokens) {
            const Load shared = shared_load(varied, device, routed.tile, ctas_per_sm(varied, device, routed.tile));
            if (!seen_shared.insert(shared).second)
                continue;
            const Config config = combine(varied, device, routed, shared);
            if (seen_literals.insert(config_literal(config)).second)
                configs.push_back(config);
        }
    }
    return configs;
}

const char* config_fault(const Config& config) {
    if (config.num_stages < 2)
        return "fewer than two pipeline stages fit into shared memory";
    if (plan::shared_memory_bytes(config) > plan::shared_memory_budget(config.num_ctas_per_sm))
        return "shared memory is exceeded";
    if (const NarrowWidths& narrow = config.narrow_widths; narrow.middle != 0 || narrow.least != 0) {
        if (config.arch != Architecture::kSM90)
            return "narrower mainloops are for sm_90a";
        if (narrow.least < plan::kMinTokenTile || narrow.least > narrow.middle ||
            narrow.middle >= config.routed_tile.num_tokens || narrow.least % 8 != 0 || narrow.middle % 8 != 0)
            return "the narrow widths are no multiples of 8 in falling order, or equal, below the routed token tile";
    }
    if (config.arch == Architecture::kSM100) {
        if (config.routed_tile.num_tokens % 16 != 0 || config.shared_tile.num_tokens % 16 != 0)
            return "a token tile is no multiple of 16";
        if (plan::tensor_memory_layout(config).num_allocated > plan::kTensorMemoryColumns)
            return "tensor memory is exceeded";
    }
    for (const int splits :
        {config.splits.routed_l1, config.splits.routed_l2, config.splits.shared_l1, config.splits.shared_l2})
        if (splits < 1 || splits > kMaxSplits)
            return "a split count is out of range";
    if (config.routed_tile.num_tokens < plan::kMinTokenTile || config.routed_tile.num_tokens > plan::kMaxTokenTile)
        return "the routed token tile is out of range";
    if (config.has_shared() && config.shared_tile.num_tokens < plan::kMinSharedTokenTile)
        return "the shared token tile is out of range";
    return nullptr;
}

} // namespace deep_gemm_k3::heuristics
