// check.h - the test harness: checks that count, named test functions, and a folder that goes away.
#pragma once

#include "error.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace specee_test {

inline int n_check  = 0;
inline int n_failed = 0;

inline void check(bool ok, const char * file, int line, const std::string & what) {
    ++n_check;
    if (!ok) {
        ++n_failed;
        std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
    }
}

// Runs f, which must throw specee::error with that status and with that text in its message.
template <typename F>
void check_error(F && f, specee_status status, const std::string & text, const char * file, int line) {
    try {
        f();
        check(false, file, line, "no error was thrown, expected one with \"" + text + "\"");
    } catch (const specee::error & e) {
        const std::string message = e.what();
        check(e.status == status, file, line, "status " + std::to_string(e.status) + ": " + message);
        check(message.find(text) != std::string::npos, file, line, "\"" + text + "\" is not in: " + message);
        check(message.find('\n') == std::string::npos, file, line, "more than one line: " + message);
    } catch (const std::exception & e) {
        check(false, file, line, std::string("another exception: ") + e.what());
    }
}

template <typename A, typename B>
void check_equal(const A & a, const B & b, const char * file, int line, const std::string & what) {
    check(a == b, file, line, what + ": " + std::to_string(a) + ", " + std::to_string(b));
}

#define CHECK(condition) specee_test::check(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) specee_test::check_equal(a, b, __FILE__, __LINE__, #a " == " #b)
#define CHECK_NEAR(a, b, tolerance)                                                                                    \
    specee_test::check(std::fabs((a) - (b)) <= (tolerance), __FILE__, __LINE__,                                        \
                       #a " ~ " #b ": " + std::to_string(a) + ", " + std::to_string(b))
#define CHECK_ERROR(expression, status, text)                                                                          \
    specee_test::check_error([&] { (void)(expression); }, status, text, __FILE__, __LINE__)

// Thrown by a test program that lacks what it needs; ctest shows it as skipped.
struct skipped {
    std::string reason;
};

struct test {
    const char * name;
    void (*run)();
};

// The body of main(): 0 when every check held and there was at least one, 77 when skipped.
inline int run(const std::vector<test> & tests) {
    for (const test & t : tests) {
        const int before = n_failed;
        const int n      = n_check;
        try {
            t.run();
        } catch (const skipped & s) {
            std::printf("SKIP: %s\n", s.reason.c_str());
            return 77;
        } catch (const std::exception & e) {
            check(false, t.name, 0, std::string("exception: ") + e.what());
        }
        check(n_check > n, t.name, 0, "the test checked nothing");
        std::printf("%s %s\n", n_failed == before ? "ok    " : "FAILED", t.name);
    }
    std::printf("%d checks, %d failed\n", n_check, n_failed);
    return n_failed == 0 && n_check > 0 ? 0 : 1;
}

// The value of an environment variable that the test cannot do without.
inline std::string need_env(const char * name) {
    const char * value = std::getenv(name);
    if (value == nullptr || *value == '\0') {
        throw skipped{std::string(name) + " is not set"};
    }
    return value;
}

// A new folder, removed with its content at the end of the scope.
class temporary_dir {
  public:
    temporary_dir() {
        std::random_device random;
        path_ = std::filesystem::temp_directory_path() /
                ("specee-test-" + std::to_string(random()) + "-" + std::to_string(random()));
        std::filesystem::create_directories(path_);
    }

    ~temporary_dir() {
        std::error_code ec;
        std::filesystem::remove_all(path_, ec);
    }

    temporary_dir(const temporary_dir &)             = delete;
    temporary_dir & operator=(const temporary_dir &) = delete;

    std::string path() const { return path_.u8string(); }

    std::string operator/(const std::string & name) const { return (path_ / std::filesystem::u8path(name)).u8string(); }

  private:
    std::filesystem::path path_;
};

inline void write_file(const std::string & path, const std::string & bytes) {
    std::ofstream out(std::filesystem::u8path(path), std::ios::binary);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    out.close();
    if (!out) {
        throw std::runtime_error("cannot write " + path);
    }
}

inline std::string read_text(const std::string & path) {
    std::ifstream in(std::filesystem::u8path(path), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

// Numbers that are the same on every platform (the distributions of <random> are not).
class random_numbers {
  public:
    explicit random_numbers(uint64_t seed) : state(seed) {}

    // splitmix64, https://prng.di.unimi.it/splitmix64.c (public domain)
    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15ull);
        z          = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z          = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }

    uint64_t below(uint64_t n) { return next() % n; }

    // Close to normal, mean 0: the sum of four uniform integers, which needs no library function.
    int32_t normal_integer() {
        const uint64_t bits = next();
        int32_t        sum  = -2 * 65535;
        for (int i = 0; i < 4; ++i) {
            sum += static_cast<int32_t>(bits >> (16 * i) & 0xffff);
        }
        return sum;
    }

    static constexpr double NORMAL_DEVIATION = 37837.2; // of normal_integer(): 65536 / sqrt(3)

    float normal() { return static_cast<float>(normal_integer() / NORMAL_DEVIATION); }

  private:
    uint64_t state;
};

} // namespace specee_test
