// error.h - the one exception of libspecee. It is thrown inside native/src only; api.cpp turns it
// into a status code and the text of specee_last_error().
#pragma once

#include "specee.h"

#include <stdexcept>
#include <string>

namespace specee {

struct error : std::runtime_error {
    specee_status status;

    error(specee_status status, const std::string & message) : std::runtime_error(message), status(status) {}
};

// Text from a file, in quotes, for a message: printable ASCII on one line, whatever the file holds, and not too long.
std::string printable(const std::string & untrusted);

} // namespace specee
