#include "json.hpp"

#include <charconv>
#include <climits>
#include <cmath>

namespace deep_gemm_k3::json {

namespace {

const char* name_of(Kind kind) {
    switch (kind) {
    case Kind::kNull:
        return "null";
    case Kind::kBool:
        return "a boolean";
    case Kind::kInt:
        return "an integer";
    case Kind::kDouble:
        return "a number";
    case Kind::kString:
        return "a string";
    case Kind::kArray:
        return "an array";
    case Kind::kObject:
        return "an object";
    }
    return "?";
}

class Parser {
  public:
    explicit Parser(std::string_view text) : text_(text) {}

    Value document() {
        Value value = any(0);
        skip_space();
        if (at_ != text_.size())
            fail("the end of the text");
        return value;
    }

  private:
    static constexpr int kMaxDepth = 64;

    [[noreturn]] void fail(const char* wanted) const {
        throw std::runtime_error("json: wanted " + std::string(wanted) + " at offset " + std::to_string(at_));
    }

    void skip_space() {
        while (
            at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
            ++at_;
    }

    bool take(char wanted) {
        skip_space();
        if (at_ >= text_.size() || text_[at_] != wanted)
            return false;
        ++at_;
        return true;
    }

    bool take_word(std::string_view word) {
        if (text_.substr(at_, word.size()) != word)
            return false;
        at_ += word.size();
        return true;
    }

    Value any(int depth) {
        if (depth > kMaxDepth)
            fail("less nesting");
        skip_space();
        if (at_ >= text_.size())
            fail("a value");
        switch (text_[at_]) {
        case '{':
            return object(depth);
        case '[':
            return array(depth);
        case '"':
            return Value(string());
        default:
            break;
        }
        if (take_word("true"))
            return Value(true);
        if (take_word("false"))
            return Value(false);
        if (take_word("null"))
            return Value();
        return number();
    }

    Value object(int depth) {
        Object out;
        take('{');
        if (take('}'))
            return Value(std::move(out));
        do {
            skip_space();
            std::string key = string();
            if (!take(':'))
                fail("':'");
            out.insert_or_assign(std::move(key), any(depth + 1));
        } while (take(','));
        if (!take('}'))
            fail("'}'");
        return Value(std::move(out));
    }

    Value array(int depth) {
        Array out;
        take('[');
        if (take(']'))
            return Value(std::move(out));
        do
            out.push_back(any(depth + 1));
        while (take(','));
        if (!take(']'))
            fail("']'");
        return Value(std::move(out));
    }

    Value number() {
        const char* begin = text_.data() + at_;
        const char* end = text_.data() + text_.size();
        int64_t whole = 0;
        const auto as_int = std::from_chars(begin, end, whole);
        const bool has_fraction = as_int.ptr < end && (*as_int.ptr == '.' || *as_int.ptr == 'e' || *as_int.ptr == 'E');
        if (as_int.ec == std::errc() && !has_fraction) {
            at_ += as_int.ptr - begin;
            return Value(whole);
        }
        double value = 0;
        const auto as_double = std::from_chars(begin, end, value);
        if (as_double.ec != std::errc())
            fail("a value");
        at_ += as_double.ptr - begin;
        return Value(value);
    }

    unsigned hex4() {
        unsigned value = 0;
        const char* begin = text_.data() + at_;
        if (at_ + 4 > text_.size() || std::from_chars(begin, begin + 4, value, 16).ptr != begin + 4)
            fail("four hexadecimal digits");
        at_ += 4;
        return value;
    }

    void append_code_point(std::string& out, unsigned code) {
        if (code < 0x80) {
            out += static_cast<char>(code);
        } else if (code < 0x800) {
            out += static_cast<char>(0xC0 | code >> 6);
            out += static_cast<char>(0x80 | (code & 0x3F));
        } else if (code < 0x10000) {
            out += static_cast<char>(0xE0 | code >> 12);
            out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
            out += static_cast<char>(0x80 | (code & 0x3F));
        } else {
            out += static_cast<char>(0xF0 | code >> 18);
            out += static_cast<char>(0x80 | (code >> 12 & 0x3F));
            out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
            out += static_cast<char>(0x80 | (code & 0x3F));
        }
    }

    void append_escape(std::string& out) {
        const char escape = at_ < text_.size() ? text_[at_++] : '\0';
        switch (escape) {
        case 'n':
            out += '\n';
            return;
        case 't':
            out += '\t';
            return;
        case 'r':
            out += '\r';
            return;
        case 'b':
            out += '\b';
            return;
        case 'f':
            out += '\f';
            return;
        case '"':
        case '\\':
        case '/':
            out += escape;
            return;
        case 'u': {
            unsigned code = hex4();
            if (code >= 0xD800 && code < 0xDC00 && take_word("\\u"))
                code = 0x10000 + ((code - 0xD800) << 10) + (hex4() - 0xDC00);
            append_code_point(out, code);
            return;
        }
        default:
            fail("an escape");
        }
    }

    std::string string() {
        if (at_ >= text_.size() || text_[at_] != '"')
            fail("a string");
        ++at_;
        std::string out;
        while (at_ < text_.size() && text_[at_] != '"') {
            const char c = text_[at_++];
            if (c == '\\')
                append_escape(out);
            else
                out += c;
        }
        if (at_ >= text_.size())
            fail("a closing quote");
        ++at_;
        return out;
    }

    std::string_view text_;
    size_t at_ = 0;
};

} // namespace

void Value::wrong_kind(const char* wanted) const {
    throw std::runtime_error(std::string("json: wanted ") + wanted + ", given " + name_of(kind_));
}

bool Value::as_bool() const {
    if (kind_ != Kind::kBool)
        wrong_kind("a boolean");
    return int_ != 0;
}

int64_t Value::as_int() const {
    if (kind_ != Kind::kInt)
        wrong_kind("an integer");
    return int_;
}

double Value::as_double() const {
    if (kind_ == Kind::kInt)
        return static_cast<double>(int_);
    if (kind_ != Kind::kDouble)
        wrong_kind("a number");
    return double_;
}

const std::string& Value::as_string() const {
    if (kind_ != Kind::kString)
        wrong_kind("a string");
    return string_;
}

const Array& Value::as_array() const {
    if (kind_ != Kind::kArray)
        wrong_kind("an array");
    return array_;
}

const Object& Value::as_object() const {
    if (kind_ != Kind::kObject)
        wrong_kind("an object");
    return object_;
}

const Value* Value::find(std::string_view key) const {
    const auto found = as_object().find(key);
    return found == object_.end() ? nullptr : &found->second;
}

const Value& Value::at(std::string_view key) const {
    const Value* found = find(key);
    if (!found)
        throw std::runtime_error("json: wanted the key '" + std::string(key) + "', given an object without it");
    return *found;
}

int Value::int_at(std::string_view key) const {
    const Value& value = at(key);
    if (value.kind_ != Kind::kInt || value.int_ < INT_MIN || value.int_ > INT_MAX)
        throw std::runtime_error("json: " + std::string(key) + ": wanted a 32-bit integer, given " + value.dump());
    return static_cast<int>(value.int_);
}

int Value::int_or(std::string_view key, int otherwise) const {
    const Value* found = find(key);
    return !found || found->is_null() ? otherwise : int_at(key);
}

bool Value::bool_or(std::string_view key, bool otherwise) const {
    const Value* found = find(key);
    return !found || found->is_null() ? otherwise : found->as_bool();
}

std::string Value::string_or(std::string_view key, std::string_view otherwise) const {
    const Value* found = find(key);
    return !found || found->is_null() ? std::string(otherwise) : found->as_string();
}

void append_quoted(std::string& out, std::string_view text) {
    static constexpr char kHex[] = "0123456789abcdef";
    out += '"';
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (static_cast<unsigned char>(c) < 0x20) {
            out += "\\u00";
            out += kHex[c >> 4 & 0xF];
            out += kHex[c & 0xF];
        } else {
            out += c;
        }
    }
    out += '"';
}

void append_double(std::string& out, double value) {
    // JSON has no infinities; Python's parser accepts these three words.
    if (std::isnan(value)) {
        out += "NaN";
    } else if (std::isinf(value)) {
        out += value < 0 ? "-Infinity" : "Infinity";
    } else {
        char text[40];
        const auto end = std::to_chars(text, text + sizeof text, value).ptr;
        out.append(text, end);
        if (std::string_view(text, end - text).find_first_of(".e") == std::string_view::npos)
            out += ".0";
    }
}

void Value::dump_to(std::string& out) const {
    bool first = true;
    switch (kind_) {
    case Kind::kNull:
        out += "null";
        return;
    case Kind::kBool:
        out += int_ ? "true" : "false";
        return;
    case Kind::kInt:
        out += std::to_string(int_);
        return;
    case Kind::kDouble:
        append_double(out, double_);
        return;
    case Kind::kString:
        append_quoted(out, string_);
        return;
    case Kind::kArray:
        out += '[';
        for (const Value& item : array_) {
            if (!first)
                out += ", ";
            first = false;
            item.dump_to(out);
        }
        out += ']';
        return;
    case Kind::kObject:
        out += '{';
        for (const auto& [key, item] : object_) {
            if (!first)
                out += ", ";
            first = false;
            append_quoted(out, key);
            out += ": ";
            item.dump_to(out);
        }
        out += '}';
        return;
    }
}

std::string Value::dump() const {
    std::string out;
    dump_to(out);
    return out;
}

Value parse(std::string_view text) {
    return Parser(text).document();
}

} // namespace deep_gemm_k3::json
