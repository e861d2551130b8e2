// check_engine: runs every kernel of tests/simt/kernels in three orders and prints what came of it. What is right is
// tests/simt/test_engine.py's affair; on another machine the same lines must come out.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "../kernels/checks.h"

namespace checks {
namespace {

std::map<std::string, void (*)(const Arguments&)>& all() {
    static std::map<std::string, void (*)(const Arguments&)> checks;
    return checks;
}

void run(const std::string& name, unsigned blocks, unsigned threads) {
    std::vector<float> values(4096);
    for (std::size_t i = 0; i < values.size(); i++) values[i] = static_cast<float>(i % 100);
    std::string outcome;
    try {
        all()[name]({values.data(), values.size(), blocks, threads, nullptr});
        double sum = 0;
        int num_nan = 0;
        for (std::size_t i = 0; i < values.size(); i++) {
            if (values[i] == values[i])
                sum += values[i] * static_cast<double>(i % 17 + 1);
            else
                num_nan++;
        }
        outcome = std::to_string(sum) + ", " + std::to_string(num_nan) + " NaN";
    } catch (const std::exception& error) {
        outcome = error.what();
        outcome.resize(std::min(outcome.size(), outcome.find(" at 0x")));  // addresses differ from run to run
        outcome.resize(std::min(outcome.size(), outcome.find(" (addr2line")));
    }
    std::printf("%s %u x %u: %s\n", name.c_str(), blocks, threads, outcome.c_str());
}

}  // namespace

Check::Check(const char* name, void (*run)(const Arguments&)) { all()[name] = run; }

}  // namespace checks

int main() {
    for (const char* order : {"forward", "reverse", "5"}) {
        setenv("SIMT_ORDER", order, 1);
        std::printf("SIMT_ORDER=%s\n", order);
        for (const auto& [name, check] : checks::all()) {
            if (name == "write_behind_values") continue;  // for AddressSanitizer alone
            checks::run(name, 2, name == "known_values" ? 1 : name.find("barrier") != std::string::npos ? 64 : 32);
        }
    }
    return 0;
}
