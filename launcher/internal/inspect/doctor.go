package inspect

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/compute/kernel"
	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/dvfs/nvml"
	"github.com/soliton-train/soliton/internal/net/ports"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/launcher/internal/cli"
	"github.com/soliton-train/soliton/launcher/internal/ssh"
)

// mark is the verdict of a check.
type mark string

const (
	ok   mark = "ok"
	warn mark = "warn"
	fail mark = "fail"
)

// Finding is one line of the report.
type Finding struct {
	Check  string `json:"check"`
	Mark   mark   `json:"mark"`
	Found  string `json:"found"`
	Advice string `json:"advice"` // what would be right; "" where all is well
}

// NewDoctor returns the command.
func NewDoctor() *cobra.Command {
	var asJSON bool
	var list []string
	var file string
	var at ports.Range
	cmd := &cobra.Command{
		Use:   "doctor [--hosts HOST,...] [--json]",
		Short: "Check what this machine has and lacks for training",
		Long: `doctor looks at what training needs of this machine and measures one thread's speed in
matrix products and of memory, which takes about a second. Each line is marked ok,
warn or fail, and says what would be right. The exit status is 1 if a line failed.
Clocks that a run has left low which was killed are put back.

With --hosts or --hosts-file, doctor looks at those machines instead, over ssh: whether the
launcher runs there, and whether each of them reaches each other at a port of --ports, or one
that the system chooses, as workers do. A failed pair is refused (a firewall, perhaps), timeout, or no route;
MTU is that of the interface. This machine takes part if it is listed.`,
		Example: `  launcher doctor
  launcher doctor --hosts localhost,b,c
  launcher doctor --json | jq '.[] | select(.mark != "ok")'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if hosts, err := ssh.Of(cmd.Flags().Changed, list, file); err != nil {
				return err
			} else if hosts != nil {
				return examineHosts(cmd, hosts, at, asJSON)
			}
			findings := examine(os.DirFS("/").(fs.ReadFileFS))
			if err := cli.Print(cmd.OutOrStdout(), findings, asJSON, func(out io.Writer) error {
				w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
				for _, f := range findings {
					fmt.Fprintf(w, "%s\t%s\t%s\n", f.Mark, f.Check, f.Found)
					if f.Advice != "" {
						fmt.Fprintf(w, "\t\t  %s\n", f.Advice)
					}
				}
				return w.Flush()
			}); err != nil {
				return err
			}
			if slices.ContainsFunc(findings, func(f Finding) bool { return f.Mark == fail }) {
				return cli.Exit(1)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the findings as JSON")
	cmd.Flags().StringSliceVar(&list, "hosts", nil, "`machines` to look at over ssh, and at the network between them")
	cmd.Flags().StringVar(&file, "hosts-file", "", "`file` with one such machine a line")
	cmd.Flags().Var(&at, portsFlag, "`ports` of which these machines are tried at one, FROM-TO (default those that the system chooses)")
	return cmd
}

// examine makes all checks. root is the file system that holds proc and sys.
func examine(root fs.ReadFileFS) []Finding {
	findings := []Finding{
		checkSystem(),
	}
	for _, g := range platform.Missing() {
		findings = append(findings, Finding{"platform", warn, "no " + g.Lacks, g.Effect})
	}
	findings = append(findings,
		checkCPU(root),
		checkCores(root, runtime.NumCPU(), runtime.GOMAXPROCS(0)),
		checkMemory(root),
		checkKernel(),
		checkGo(),
		checkRunDir("."),
		checkFiles(),
		checkClock(root),
		measureProduct(),
		measureMemory(),
		checkLeftClocks(dvfs.SysFS),
		checkCPUClock(dvfs.SysFS),
	)
	return append(findings, checkCards(nvml.Open())...)
}

func read(root fs.ReadFileFS, name string) string {
	b, err := root.ReadFile(name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func checkSystem() Finding {
	f := Finding{"system", ok, runtime.GOOS + "/" + runtime.GOARCH, ""}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		f.Found += ", " + unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
	}
	return f
}

func checkCPU(root fs.ReadFileFS) Finding {
	for line := range strings.SplitSeq(read(root, "proc/cpuinfo"), "\n") {
		if name, model, found := strings.Cut(line, ":"); found && strings.TrimSpace(name) == "model name" {
			return Finding{"processor", ok, strings.TrimSpace(model), ""}
		}
	}
	return Finding{"processor", ok, "unknown model", ""}
}

// checkCores compares the processors with what this process may use of them.
func checkCores(root fs.ReadFileFS, cpus, procs int) Finding {
	f := Finding{"cores", ok, fmt.Sprintf("%d usable, GOMAXPROCS %d", cpus, procs), ""}
	if quota, found := cgroupQuota(root); found {
		f.Found += fmt.Sprintf(", cgroup quota %.3g", quota)
		if float64(procs) > quota+1 {
			f.Mark = warn
			f.Advice = fmt.Sprintf("more threads than the quota lets run: set GOMAXPROCS or --threads to %d", max(1, int(quota)))
		}
	}
	if procs < cpus && f.Mark == ok && os.Getenv("GOMAXPROCS") != "" {
		f.Mark, f.Advice = warn, "GOMAXPROCS in the environment leaves cores idle: unset it"
	}
	return f
}

// cgroupQuota returns the processors a cgroup lets this process use. Inside a container
// the limit is at the root of the mounted hierarchy.
func cgroupQuota(root fs.ReadFileFS) (float64, bool) {
	fields := strings.Fields(read(root, "sys/fs/cgroup/cpu.max"))
	if len(fields) != 2 {
		fields = []string{read(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us"), read(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us")}
	}
	quota, err1 := strconv.ParseFloat(fields[0], 64)
	period, err2 := strconv.ParseFloat(fields[1], 64)
	if err1 != nil || err2 != nil || quota <= 0 || period <= 0 {
		return 0, false
	}
	return quota / period, true
}

func checkMemory(root fs.ReadFileFS) Finding {
	values := map[string]uint64{}
	for line := range strings.SplitSeq(read(root, "proc/meminfo"), "\n") {
		name, rest, _ := strings.Cut(line, ":")
		if fields := strings.Fields(rest); len(fields) > 0 {
			if kib, err := strconv.ParseUint(fields[0], 10, 64); err == nil {
				values[name] = kib << 10
			}
		}
	}
	free, total := values["MemAvailable"], values["MemTotal"]
	if total == 0 {
		return Finding{"memory", warn, "unknown", "/proc/meminfo cannot be read: on Linux, mount /proc"}
	}
	f := Finding{"memory", ok, fmt.Sprintf("%s available of %s", size(free), size(total)), ""}
	if limit, err := strconv.ParseUint(read(root, "sys/fs/cgroup/memory.max"), 10, 64); err == nil && limit < total {
		f.Found += ", cgroup limit " + size(limit)
		used, _ := strconv.ParseUint(read(root, "sys/fs/cgroup/memory.current"), 10, 64)
		free = min(free, limit-min(used, limit))
	}
	if free < 1<<30 {
		f.Mark, f.Advice = warn, "less than 1 GiB is free: the default GPT example needs about that much"
	}
	return f
}

// size prints a number of bytes.
func size(n uint64) string {
	if n >= 1<<30 {
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	}
	return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20))
}

func checkKernel() Finding {
	var names []string
	for _, p := range kernel.Available() {
		names = append(names, p.String())
	}
	f := Finding{"kernels", ok, fmt.Sprintf("%v (this processor runs %s)", kernel.Active(), strings.Join(names, ", ")), ""}
	switch {
	case kernel.Err() != nil:
		f.Mark, f.Advice = fail, kernel.Err().Error()
	case kernel.Active() == kernel.Generic && len(names) == 1:
		f.Mark, f.Advice = warn, "plain Go is slow: AVX2 with FMA, or AVX-512, would be right"
	case kernel.Active() != kernel.Available()[len(names)-1]:
		f.Mark, f.Advice = warn, kernel.EnvPath+" chooses a slower path: unset it"
	}
	return f
}

func checkGo() Finding {
	out, err := exec.Command("go", "version").Output()
	if err != nil {
		return Finding{"go command", warn, "not found", "PROGRAM as a Go package path needs it in PATH; executable files run without"}
	}
	return Finding{"go command", ok, strings.TrimSpace(strings.TrimPrefix(string(out), "go version ")), ""}
}

// checkRunDir checks that default run directories can be made below dir.
func checkRunDir(dir string) Finding {
	shown := filepath.Join(dir, "runs")
	f := Finding{"run directory", ok, shown + " can be written", ""}
	probe := dir
	if _, err := os.Stat(shown); err == nil {
		probe = shown
	}
	temp, err := os.MkdirTemp(probe, ".doctor-")
	if err != nil {
		return Finding{"run directory", fail, shown + " cannot be written", "give launcher run a writable place with --run-dir DIR"}
	}
	_ = os.Remove(temp)
	var st unix.Statfs_t
	if unix.Statfs(probe, &st) == nil {
		free := st.Bavail * uint64(st.Bsize)
		f.Found += ", " + size(free) + " free"
		if free < 1<<30 {
			f.Mark, f.Advice = warn, "less than 1 GiB is free for models and metrics"
		}
	}
	return f
}

func checkFiles() Finding {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return Finding{"open files", warn, "limit unknown", ""}
	}
	f := Finding{"open files", ok, fmt.Sprintf("at most %d", l.Cur), ""}
	if l.Cur < 1024 {
		f.Mark, f.Advice = warn, "1024 or more would be right: ulimit -n 1024"
	}
	return f
}

func checkClock(root fs.ReadFileFS) Finding {
	source := read(root, "sys/devices/system/clocksource/clocksource0/current_clocksource")
	switch source {
	case "":
		return Finding{"clock", ok, "source unknown", ""}
	case "acpi_pm", "hpet", "jiffies", "refined-jiffies":
		return Finding{"clock", warn, source, "reading it is slow, which blurs measured times: tsc or kvm-clock would be right"}
	}
	return Finding{"clock", ok, source, ""}
}

// measured is how long each measurement takes.
const measured = 300 * time.Millisecond

// rate calls f, which does work of the given amount, until the time is up, and
// returns the amount a second of the fastest call.
func rate(amount float64, f func()) float64 {
	f() // the first touches memory
	best := time.Duration(1 << 62)
	for began := time.Now(); time.Since(began) < measured; {
		t := time.Now()
		f()
		best = min(best, max(time.Since(t), 1))
	}
	return amount / best.Seconds()
}

func measureProduct() Finding {
	const n = 512
	data := func() []float32 {
		x := make([]float32, n*n)
		for i := range x {
			x[i] = float32(i%7) - 3
		}
		return x
	}
	a, b, c := kernel.Matrix(data(), n, n), kernel.Matrix(data(), n, n), kernel.Matrix(data(), n, n)
	flops := rate(2*n*n*n, func() { kernel.MatMul(nil, c, a, b) })
	f := Finding{"matrix product", ok, fmt.Sprintf("%.1f GFLOP/s on one thread (float32, %d x %d)", flops/1e9, n, n), ""}
	if flops < 10e9 && kernel.Active() != kernel.Generic {
		f.Mark, f.Advice = warn, "slow for these kernels: is the machine busy, or its clock lowered?"
	}
	return f
}

func measureMemory() Finding {
	const n = 64 << 20 // bytes, beyond most caches
	src, dst := make([]byte, n), make([]byte, n)
	for i := range src {
		src[i] = 1 // pages that were never written are all the same page
	}
	bandwidth := rate(2*n, func() { copy(dst, src) })
	f := Finding{"memory bandwidth", ok, fmt.Sprintf("%.1f GB/s on one thread (copy, read plus write)", bandwidth/1e9), ""}
	if bandwidth < 2e9 {
		f.Mark, f.Advice = warn, "slow: is the machine busy?"
	}
	return f
}
