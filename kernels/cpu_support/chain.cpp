// Several bound kernels in one call.
#include <cstdint>

extern "C" struct Command {
  int (*kernel)(const void* args, float* scratch, int64_t scratch_floats, int threads);
  const void* args;
};

// Runs the commands in order up to the first that refuses; returns how many ran.
extern "C" int64_t forebay_chain(const Command* commands, int64_t count, float* scratch, int64_t scratch_floats,
                                 int threads) {
  for (int64_t i = 0; i < count; ++i)
    if (commands[i].kernel(commands[i].args, scratch, scratch_floats, threads)) return i;
  return count;
}
