#include "error.h"

namespace specee {

std::string printable(const std::string & untrusted) {
    const char * const hex   = "0123456789abcdef";
    const size_t       n_max = 80;
    std::string        out   = "\"";
    for (size_t i = 0; i < untrusted.size(); ++i) {
        if (i == n_max) {
            out += "...";
            break;
        }
        const unsigned char c = static_cast<unsigned char>(untrusted[i]);
        if (c == '"' || c == '\\') {
            out += '\\';
            out += static_cast<char>(c);
        } else if (c >= 0x20 && c < 0x7f) {
            out += static_cast<char>(c);
        } else {
            out += "\\x";
            out += hex[c >> 4];
            out += hex[c & 15];
        }
    }
    return out + "\"";
}

} // namespace specee
