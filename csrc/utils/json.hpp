// A small JSON value: enough for the descriptions that cross the boundary between Python and the host library.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace deep_gemm_k3::json {

class Value;
using Array = std::vector<Value>;
// Keys in insertion order would need a second container; nobody reads these objects by eye without a formatter.
using Object = std::map<std::string, Value, std::less<>>;

enum class Kind { kNull, kBool, kInt, kDouble, kString, kArray, kObject };

class Value {
  public:
    Value() = default;
    Value(bool value) : kind_(Kind::kBool), int_(value) {}
    Value(int value) : kind_(Kind::kInt), int_(value) {}
    Value(int64_t value) : kind_(Kind::kInt), int_(value) {}
    Value(uint64_t value) : kind_(Kind::kInt), int_(static_cast<int64_t>(value)) {}
    Value(double value) : kind_(Kind::kDouble), double_(value) {}
    Value(const char* value) : kind_(Kind::kString), string_(value) {}
    Value(std::string value) : kind_(Kind::kString), string_(std::move(value)) {}
    Value(Array value) : kind_(Kind::kArray), array_(std::move(value)) {}
    Value(Object value) : kind_(Kind::kObject), object_(std::move(value)) {}

    Kind kind() const { return kind_; }
    bool is_null() const { return kind_ == Kind::kNull; }

    bool as_bool() const;
    int64_t as_int() const;
    double as_double() const;
    const std::string& as_string() const;
    const Array& as_array() const;
    const Object& as_object() const;

    // Null when this is an object without that key.
    const Value* find(std::string_view key) const;
    // Throws with the key's name.
    const Value& at(std::string_view key) const;
    int int_at(std::string_view key) const;
    int int_or(std::string_view key, int otherwise) const;
    bool bool_or(std::string_view key, bool otherwise) const;
    std::string string_or(std::string_view key, std::string_view otherwise) const;

    std::string dump() const;

  private:
    void dump_to(std::string& out) const;
    [[noreturn]] void wrong_kind(const char* wanted) const;

    Kind kind_ = Kind::kNull;
    int64_t int_ = 0;
    double double_ = 0;
    std::string string_;
    Array array_;
    Object object_;
};

Value parse(std::string_view text);
// `text` in quotes, with escapes.
void append_quoted(std::string& out, std::string_view text);
void append_double(std::string& out, double value);

} // namespace deep_gemm_k3::json
