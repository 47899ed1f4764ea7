// A JSON object whose values are numbers, strings, true, false or null: the form in which Python hands over specs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace deep_gemm_k3::runtime {

class FlatJson {
  public:
    // Throws std::runtime_error with the position of the first character that does not fit.
    static FlatJson parse(std::string_view text);

    bool has(const std::string& name) const { return values_.count(name) != 0; }
    // The value under `name`; throws, naming it, when it is absent or of another kind.
    int64_t integer(const std::string& name) const;
    int64_t integer(const std::string& name, int64_t absent) const { return has(name) ? integer(name) : absent; }
    const std::string& text(const std::string& name) const;
    std::string text(const std::string& name, const std::string& absent) const {
        return has(name) ? text(name) : absent;
    }

  private:
    struct Value {
        bool is_text;
        std::string text; // a string's characters, or a number or literal as written
    };
    std::map<std::string, Value> values_;
};

} // namespace deep_gemm_k3::runtime
