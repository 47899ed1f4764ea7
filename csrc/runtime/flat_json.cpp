#include "runtime/flat_json.hpp"

#include <charconv>
#include <stdexcept>

namespace deep_gemm_k3::runtime {
namespace {

class Reader {
  public:
    explicit Reader(std::string_view text) : text_(text) {}

    char peek() {
        while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t'))
            ++at_;
        return at_ < text_.size() ? text_[at_] : '\0';
    }
    bool accept(char wanted) {
        if (peek() != wanted)
            return false;
        ++at_;
        return true;
    }
    void expect(char wanted) {
        if (!accept(wanted))
            fail(std::string("'") + wanted + "'");
    }
    std::string quoted() {
        expect('"');
        std::string out;
        while (at_ < text_.size() && text_[at_] != '"') {
            if (text_[at_] == '\\' && ++at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' &&
                text_[at_] != '/')
                fail("a plain character or one of \\\" \\\\ \\/");
            if (at_ < text_.size())
                out += text_[at_++];
        }
        expect('"');
        return out;
    }
    std::string bare() {
        peek();
        const size_t from = at_;
        while (at_ < text_.size() && text_[at_] != ',' && text_[at_] != '}' && text_[at_] != ' ')
            ++at_;
        if (at_ == from)
            fail("a value");
        return std::string(text_.substr(from, at_ - from));
    }
    [[noreturn]] void fail(const std::string& wanted) const {
        throw std::runtime_error(
            "spec: wanted " + wanted + " at character " + std::to_string(at_) + ", given " + std::string(text_));
    }

  private:
    std::string_view text_;
    size_t at_ = 0;
};

} // namespace

FlatJson FlatJson::parse(std::string_view text) {
    FlatJson out;
    Reader reader(text);
    reader.expect('{');
    if (!reader.accept('}')) {
        do {
            std::string name = reader.quoted();
            reader.expect(':');
            const bool is_text = reader.peek() == '"';
            out.values_[name] = Value{is_text, is_text ? reader.quoted() : reader.bare()};
        } while (reader.accept(','));
        reader.expect('}');
    }
    if (reader.peek() != '\0')
        reader.fail("the end");
    return out;
}

int64_t FlatJson::integer(const std::string& name) const {
    const auto found = values_.find(name);
    if (found == values_.end())
        throw std::runtime_error("spec: wanted an integer " + name + ", given none");
    const std::string& text = found->second.text;
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (found->second.is_text || error != std::errc() || end != text.data() + text.size())
        throw std::runtime_error("spec: wanted an integer " + name + ", given " + text);
    return value;
}

const std::string& FlatJson::text(const std::string& name) const {
    const auto found = values_.find(name);
    if (found == values_.end())
        throw std::runtime_error("spec: wanted a string " + name + ", given none");
    if (!found->second.is_text)
        throw std::runtime_error("spec: wanted a string " + name + ", given " + found->second.text);
    return found->second.text;
}

} // namespace deep_gemm_k3::runtime
