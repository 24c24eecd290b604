// Runs kernels on a processor that is emulated: calls come through standard input, what they leave goes to standard
// output. All numbers are of 64 bits. A call: its kernel's name (64 bytes), bytes of arguments and these, floats of
// scratch, threads, number of blocks, and of each its bytes and these; number of pointers, and of each where it stands in
// the arguments, its block, and where it points within. An answer: what the kernel returned, and the bytes of all blocks.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

void read(void* to, size_t nbytes) {
  if (nbytes && std::fread(to, 1, nbytes, stdin) != nbytes) std::exit(0);  // the other side is gone
}

int64_t number() {
  int64_t n;
  read(&n, sizeof n);
  return n;
}

// Memory that ends where a page begins that nobody may touch.
class Block {
 public:
  explicit Block(int64_t nbytes) : nbytes_(size_t(nbytes)) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), whole = (nbytes_ + page - 1) / page * page;
    mapped_nbytes_ = whole + page;
    void* mapped = mmap(nullptr, mapped_nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    mapped_ = static_cast<char*>(mapped);
    if (mprotect(mapped_ + whole, page, PROT_NONE)) std::abort();
    data = mapped_ + whole - nbytes_;
  }
  Block(const Block&) = delete;
  Block(Block&& other) noexcept : data(other.data), nbytes_(other.nbytes_), mapped_(other.mapped_) {
    mapped_nbytes_ = other.mapped_nbytes_;
    other.mapped_ = nullptr;
  }
  ~Block() {
    if (mapped_) munmap(mapped_, mapped_nbytes_);
  }
  void fill() { read(data, nbytes_); }
  void write() const { std::fwrite(data, 1, nbytes_, stdout); }

  char* data;

 private:
  size_t nbytes_;
  char* mapped_;
  size_t mapped_nbytes_;
};

}  // namespace

int main(int, char** given) {
  void* library = dlopen(given[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  for (;;) {
    char name[64];
    read(name, sizeof name);
    auto* kernel = reinterpret_cast<int (*)(const void*, float*, int64_t, int)>(dlsym(library, name));
    if (!kernel) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    Block args(number());
    args.fill();
    const int64_t floats = number(), threads = number();
    Block scratch(floats * 4);
    std::vector<Block> blocks;
    for (int64_t i = number(); i > 0; --i) {
      blocks.emplace_back(number());
      blocks.back().fill();
    }
    for (int64_t i = number(); i > 0; --i) {
      const int64_t at = number(), block = number();
      char* pointer = blocks[size_t(block)].data + number();
      std::memcpy(args.data + at, &pointer, sizeof pointer);
    }
    const int64_t returned = kernel(args.data, reinterpret_cast<float*>(scratch.data), floats, int(threads));
    std::fwrite(&returned, sizeof returned, 1, stdout);
    for (const Block& block : blocks) block.write();
    std::fflush(stdout);
  }
}
