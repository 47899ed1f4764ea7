#include "lexer.hpp"

#include <cctype>
#include <cstdlib>

namespace deep_gemm_k3::emulator {

namespace {

bool is_name_start(char c) {
    return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
}
bool is_name_part(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$';
}

class Lexer {
  public:
    explicit Lexer(const std::string& text) : text_(text) {}

    std::vector<Token> run() {
        while (skip_space()) {
            Token token;
            token.line = line_;
            token.glued = pos_ == last_end_;
            read(token);
            last_end_ = pos_;
            tokens_.push_back(std::move(token));
        }
        Token end;
        end.line = line_;
        tokens_.push_back(end);
        return std::move(tokens_);
    }

  private:
    const std::string& text_;
    size_t pos_ = 0, last_end_ = ~size_t{0};
    int line_ = 1;
    std::vector<Token> tokens_;

    char at(size_t i) const { return i < text_.size() ? text_[i] : '\0'; }

    bool skip_space() {
        while (pos_ < text_.size()) {
            char c = text_[pos_];
            if (c == '\n') {
                ++line_, ++pos_;
            } else if (std::isspace(static_cast<unsigned char>(c)) || c == '\0') {
                ++pos_;
            } else if (c == '/' && at(pos_ + 1) == '/') {
                while (pos_ < text_.size() && text_[pos_] != '\n')
                    ++pos_;
            } else if (c == '/' && at(pos_ + 1) == '*') {
                size_t end = text_.find("*/", pos_ + 2);
                if (end == std::string::npos)
                    throw PtxError(line_, "comment without an end");
                for (; pos_ < end + 2; ++pos_)
                    line_ += text_[pos_] == '\n';
            } else {
                return true;
            }
        }
        return false;
    }

    void read(Token& token) {
        char c = text_[pos_];
        if (is_name_start(c) || (c == '.' && (is_name_part(at(pos_ + 1))))) {
            read_name(token);
        } else if (std::isdigit(static_cast<unsigned char>(c))) {
            read_number(token);
        } else if (c == '"') {
            size_t end = text_.find('"', pos_ + 1);
            if (end == std::string::npos)
                throw PtxError(line_, "string without an end");
            token.kind = Token::Kind::Text;
            token.text = text_.substr(pos_ + 1, end - pos_ - 1);
            pos_ = end + 1;
        } else {
            token.kind = Token::Kind::Symbol;
            token.text = std::string(1, c);
            ++pos_;
        }
    }

    void read_name(Token& token) {
        size_t start = pos_++;
        while (is_name_part(at(pos_)))
            ++pos_;
        // qualified modifiers such as .shared::cluster or .mbarrier::complete_tx::bytes
        while (text_[start] == '.' && at(pos_) == ':' && at(pos_ + 1) == ':' && is_name_part(at(pos_ + 2))) {
            pos_ += 2;
            while (is_name_part(at(pos_)))
                ++pos_;
        }
        token.kind = Token::Kind::Name;
        token.text = text_.substr(start, pos_ - start);
    }

    void read_number(Token& token) {
        token.kind = Token::Kind::Integer;
        char c = text_[pos_], d = at(pos_ + 1);
        if (c == '0' && (d == 'f' || d == 'F' || d == 'd' || d == 'D')) {
            token.kind = Token::Kind::Float;
            token.is_single = d == 'f' || d == 'F';
            int digits = token.is_single ? 8 : 16;
            for (int i = 0; i < digits; ++i)
                if (!std::isxdigit(static_cast<unsigned char>(at(pos_ + 2 + i))))
                    throw PtxError(line_, "bad float literal");
            token.bits = std::strtoull(text_.substr(pos_ + 2, digits).c_str(), nullptr, 16);
            pos_ += 2 + digits;
            return;
        }
        size_t end = pos_;
        bool is_hex = c == '0' && (d == 'x' || d == 'X');
        bool is_binary = c == '0' && (d == 'b' || d == 'B');
        if (is_hex || is_binary)
            end += 2;
        while (std::isxdigit(static_cast<unsigned char>(at(end))) &&
               (is_hex || std::isdigit(static_cast<unsigned char>(at(end)))))
            ++end;
        bool is_decimal_point =
            !is_hex && !is_binary && at(end) == '.' && std::isdigit(static_cast<unsigned char>(at(end + 1)));
        if (is_decimal_point) {
            char* stop = nullptr;
            double value = std::strtod(text_.c_str() + pos_, &stop);
            token.kind = Token::Kind::Float;
            token.bits = bits<u64>(value);
            pos_ = static_cast<size_t>(stop - text_.c_str());
            return;
        }
        std::string digits = text_.substr(pos_, end - pos_);
        token.bits =
            is_binary ? std::strtoull(digits.c_str() + 2, nullptr, 2) : std::strtoull(digits.c_str(), nullptr, 0);
        if (at(end) == 'U' || at(end) == 'u')
            ++end;
        pos_ = end;
    }
};

} // namespace

std::vector<Token> tokenize(const std::string& text) {
    return Lexer(text).run();
}

} // namespace deep_gemm_k3::emulator
