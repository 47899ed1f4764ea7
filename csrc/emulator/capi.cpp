// The plain C interface that the Python face and the launch layer use. Every call that can fail returns 0 or a null
// pointer on failure and leaves the reason in emulator_error(), per thread.
#include "device.hpp"
#include "jit/tensor_map.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace deep_gemm_k3::emulator;

namespace {

thread_local std::string error_text, answer_text;

template <class R, class F>
R guarded(R failure, F f) {
    try {
        error_text.clear();
        return f();
    } catch (const Fault& fault) {
        error_text = fault.kind + ": " + fault.what();
    } catch (const std::exception& error) {
        error_text = error.what();
    }
    return failure;
}

struct Instance {
    Module* module;
    std::shared_ptr<ModuleInstance> state;
};

} // namespace

EXPORT const char* emulator_error() {
    return error_text.c_str();
}

EXPORT int emulator_supported() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

EXPORT void* emulator_module(const char* text, u64 bytes) {
    return guarded<void*>(nullptr, [&] { return new Module(std::string(text, bytes)); });
}
EXPORT void emulator_module_free(void* module) {
    delete static_cast<Module*>(module);
}
EXPORT const char* emulator_module_describe(void* module) {
    answer_text = static_cast<Module*>(module)->describe();
    return answer_text.c_str();
}
// decodes a kernel, or all of them when the name is empty: every opcode and modifier is checked
EXPORT int emulator_module_check(void* module, const char* kernel) {
    return guarded(0, [&] {
        Module& m = *static_cast<Module*>(module);
        std::string name = kernel;
        for (auto& function : m.syntax().functions)
            if (function->is_entry && (name.empty() || function->name == name))
                m.program(function->name);
        return 1;
    });
}

EXPORT void* emulator_instance(void* module) {
    return guarded<void*>(nullptr, [&] {
        Module* m = static_cast<Module*>(module);
        return new Instance{m, m->instantiate()};
    });
}
EXPORT void emulator_instance_free(void* instance) {
    delete static_cast<Instance*>(instance);
}
EXPORT u64 emulator_instance_base(void* instance) {
    return static_cast<Instance*>(instance)->state->base;
}

EXPORT void* emulator_machine(u64 seed, int adversary, u32 flags, u32 quantum, u64 max_instructions) {
    // flags: 1 race detection, 2 time runs on at a deadlock, 4 lanes apart, 8 coverage
    Options options;
    options.seed = seed;
    options.adversary = static_cast<Adversary>(adversary);
    options.races = flags & 1, options.time_on_deadlock = flags & 2;
    options.lanes_apart = flags & 4, options.coverage = flags & 8;
    options.quantum = quantum ? quantum : 400;
    options.max_instructions = max_instructions;
    return new Machine(options);
}
EXPORT void emulator_machine_free(void* machine) {
    delete static_cast<Machine*>(machine);
}
EXPORT void emulator_memory_add(void* machine, u64 low, u64 bytes, const char* name, int writable) {
    if (bytes)
        static_cast<Machine*>(machine)->memory.add(low, bytes, name, writable != 0);
}
EXPORT void emulator_memory_remove(void* machine, u64 low) {
    static_cast<Machine*>(machine)->memory.remove(low);
}

EXPORT int emulator_launch(
    void* machine, void* instance, const char* kernel, const u32* shape, const void* params, u64 bytes) {
    // shape: grid, block, cluster (three each), dynamic shared bytes, number of SMs, rank
    Machine& m = *static_cast<Machine*>(machine);
    int done = guarded(0, [&] {
        Instance* of = static_cast<Instance*>(instance);
        LaunchArguments a;
        a.module = of->module, a.instance = of->state, a.kernel = kernel;
        for (int i = 0; i < 3; ++i)
            a.grid[i] = shape[i], a.block[i] = shape[3 + i], a.cluster[i] = shape[6 + i];
        a.dynamic_shared = shape[9], a.num_sms = shape[10], a.rank = shape[11];
        a.params = static_cast<const u8*>(params), a.param_bytes = bytes;
        m.launches.push_back(prepare(a));
        return 1;
    });
    if (!done) // none of a list of which one is refused: the caller does not run it
        m.launches.clear();
    return done;
}
// runs every launch added since the last run, concurrently; afterwards the launches are gone
EXPORT int emulator_run(void* machine) {
    Machine& m = *static_cast<Machine*>(machine);
    int done = guarded(0, [&] {
        for (auto& launch : m.launches) {
            u64 globals = launch->instance->storage.size() * 8 - 256;
            m.memory.add(launch->instance->base, globals, "module variables", true);
            m.memory.add(launch->param_base, launch->program->param_bytes + 1, "kernel parameters", false);
        }
        m.run();
        return 1;
    });
    for (auto& launch : m.launches)
        m.memory.forget(launch->param_base);
    m.reset();
    return done;
}
// roles: "name*count,name,..." by warp, or empty
EXPORT int emulator_observe(void* machine, const char* roles, int trace) {
    return guarded(0, [&] {
        Observer& observer = static_cast<Machine*>(machine)->observer;
        observer.set_roles(roles);
        observer.is_tracing = trace != 0;
        return 1;
    });
}
EXPORT void emulator_own(void* machine, u64 low, u64 bytes, u32 rank) {
    static_cast<Machine*>(machine)->observer.own(low, bytes, rank);
}
EXPORT const char* emulator_trace(void* machine) {
    answer_text = static_cast<Machine*>(machine)->observer.trace_json();
    return answer_text.c_str();
}
EXPORT const char* emulator_reached(void* machine) {
    answer_text = static_cast<Machine*>(machine)->reached_lines();
    return answer_text.c_str();
}
EXPORT const char* emulator_report(void* machine) {
    answer_text = report_json(*static_cast<Machine*>(machine));
    return answer_text.c_str();
}

EXPORT int emulator_tensor_map(void* out, const u32* numbers, u64 base, const u64* sizes, const u64* strides) {
    // numbers: type, rank, interleave, swizzle, l2 promotion, out-of-bounds fill, box (5), element strides (5)
    return guarded(0, [&] {
        namespace jit = deep_gemm_k3::jit;
        jit::TensorMapSpec spec;
        spec.type = static_cast<jit::TensorMapType>(numbers[0]);
        spec.rank = numbers[1];
        spec.address = reinterpret_cast<const void*>(base);
        spec.interleave = static_cast<jit::TensorMapInterleave>(numbers[2]);
        spec.swizzle = static_cast<jit::TensorMapSwizzle>(numbers[3]);
        spec.l2_promotion = static_cast<jit::TensorMapL2Promotion>(numbers[4]);
        spec.fill = static_cast<jit::TensorMapFill>(numbers[5]);
        for (int i = 0; i < jit::kMaxTensorMapRank; ++i) {
            spec.dims[i] = sizes[i], spec.box[i] = numbers[6 + i], spec.element_strides[i] = numbers[11 + i];
            if (i < jit::kMaxTensorMapRank - 1)
                spec.strides[i] = strides[i];
        }
        deep_gemm_k3::TensorMap map = jit::encode_tensor_map(spec, jit::Target::kEmulator, "emulator");
        std::memcpy(out, &map, sizeof(map));
        return 1;
    });
}
