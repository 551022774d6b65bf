// What the C++ tests count: conditions that held, and those that did not, which are printed.
#ifndef HYBRIDQ_TESTS_EXPECT_H_
#define HYBRIDQ_TESTS_EXPECT_H_

#include <cstdio>
#include <cstring>

namespace hybridq {

inline int checks = 0;
inline int failures = 0;

inline void Expect(bool ok, const char* what, const char* file, int line) {
  ++checks;
  if (ok) return;
  ++failures;
  const char* name = std::strrchr(file, '/');
  std::printf("%s:%d: %s\n", name == nullptr ? file : name + 1, line, what);
}

}  // namespace hybridq

#define EXPECT(condition) hybridq::Expect(condition, #condition, __FILE__, __LINE__)

#endif  // HYBRIDQ_TESTS_EXPECT_H_
