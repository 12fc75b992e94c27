package dvfs

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// SysFS is where Linux shows its devices.
const SysFS = "/sys"

const (
	policyDir  = "devices/system/cpu/cpufreq"
	capDir     = "class/powercap"
	maxKHz     = 100_000_000 // 100 GHz
	maxFile    = 16 << 10    // bytes that are read of a file of sysfs
	maxEntries = 4 * maxPolicies
	cpuGrid    = 100 // MHz between the steps of a driver that lists none
)

var policyName = regexp.MustCompile(`^policy[0-9]{1,5}$`)

func isPolicy(name string) bool { return policyName.MatchString(name) }

// CPU is the clock of all processors of this machine, through cpufreq of Linux
// (https://docs.kernel.org/admin-guide/pm/cpufreq.html). Set writes scaling_max_freq of all policies, and
// scaling_min_freq where that is above; Current is the fastest policy's. Energy is that of the packages, through
// powercap, and often for root only.
type CPU struct {
	root     string
	driver   string
	governor string
	found    []Policy
	limits   []Policy // of the hardware
	steps    []int
	zones    []string // of powercap
	last     []uint64 // their counters when they were read last
	joules   float64
}

// OpenCPU returns the clock of the processors. root is where sysfs is mounted; "" means [SysFS]. Nothing is
// changed. On a machine without cpufreq, as most virtual ones are, the error is [ErrUnsupported]. The error is
// ErrUnsupported, too, where the governor keeps the lowest frequency whatever is allowed.
func OpenCPU(root string) (*CPU, error) {
	c := &CPU{root: cmp.Or(root, SysFS)}
	names, err := c.list(policyDir)
	if err != nil {
		return nil, fmt.Errorf("cpufreq: %w; this machine does not let its processors' clocks be set", typed(err))
	}
	names = slices.DeleteFunc(names, func(n string) bool { return !isPolicy(n) })
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(len(a)-len(b), strings.Compare(a, b)) })
	if len(names) == 0 {
		return nil, fmt.Errorf("cpufreq: %w: this machine does not let its processors' clocks be set", ErrUnsupported)
	}
	if len(names) > maxPolicies {
		return nil, fmt.Errorf("cpufreq: %w: %d policies; at most %d are looked after", ErrUnsupported, len(names), maxPolicies)
	}
	var steps []int
	listed := true
	for _, name := range names {
		p, hw := Policy{Name: name}, Policy{Name: name}
		for _, f := range []struct {
			file string
			v    *int
		}{{"scaling_min_freq", &p.Min}, {"scaling_max_freq", &p.Max}, {"cpuinfo_min_freq", &hw.Min}, {"cpuinfo_max_freq", &hw.Max}} {
			if *f.v, err = c.kHz(name, f.file); err != nil {
				return nil, err
			}
		}
		if p.Min > p.Max || hw.Min > hw.Max || hw.Max < 1000 {
			return nil, fmt.Errorf("cpufreq: %s: %w: limits %d to %d and %d to %d kHz", name, ErrUnsupported, p.Min, p.Max, hw.Min, hw.Max)
		}
		c.found, c.limits = append(c.found, p), append(c.limits, hw)
		own, err := c.available(name, hw)
		if err != nil {
			return nil, err
		}
		listed = listed && own != nil
		steps = append(steps, own...)
	}
	for file, v := range map[string]*string{"scaling_driver": &c.driver, "scaling_governor": &c.governor} {
		if *v, err = c.text(path.Join(policyDir, names[0], file)); err != nil && !errors.Is(err, ErrUnsupported) {
			return nil, err
		}
	}
	// The drivers of Intel and AMD that choose by themselves know powersave as a preference.
	if c.governor == "powersave" && !strings.HasPrefix(c.driver, "intel_pstate") && !strings.HasPrefix(c.driver, "amd-pstate") || c.governor == "userspace" {
		return nil, fmt.Errorf("cpufreq: %w: governor %s keeps one frequency; schedutil or performance would be right", ErrUnsupported, c.governor)
	}
	lo, hi := c.Limits()
	if steps = append(steps, lo, hi); !listed {
		steps = Grid(lo, hi, cpuGrid)
	}
	slices.Sort(steps)
	c.steps = slices.Compact(steps)
	if len(c.steps) > MaxSteps {
		c.steps = Grid(lo, hi, cpuGrid)
	}
	c.openZones()
	return c, nil
}

// available returns the frequencies of a policy in MHz, nil where the driver does not list them.
func (c *CPU) available(policy string, hw Policy) ([]int, error) {
	text, err := c.text(path.Join(policyDir, policy, "scaling_available_frequencies"))
	if errors.Is(err, ErrUnsupported) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var steps []int
	for _, field := range strings.Fields(text) {
		khz, err := strconv.Atoi(field)
		if err != nil || khz < 1000 || khz > maxKHz {
			return nil, fmt.Errorf("cpufreq: %s/scaling_available_frequencies: %w: frequency %.20q", policy, ErrUnsupported, field)
		}
		if khz >= hw.Min && khz <= hw.Max {
			steps = append(steps, khz/1000)
		}
	}
	return steps, nil
}

// Name implements [Clock].
func (c *CPU) Name() string {
	name := fmt.Sprintf("processors (%d cpufreq policies", len(c.found))
	if len(c.found) == 1 {
		name = "processors (1 cpufreq policy"
	}
	if c.driver != "" {
		name += ", driver " + c.driver
	}
	if c.governor != "" {
		name += ", governor " + c.governor
	}
	return name + ")"
}

// Limits are those of the hardware, from the lowest of all policies to the highest. Each policy keeps within its own.
func (c *CPU) Limits() (lo, hi int) {
	lo = maxKHz
	for _, p := range c.limits {
		lo, hi = min(lo, (p.Min+999)/1000), max(hi, p.Max/1000)
	}
	return min(lo, hi), hi
}

// Steps implements [Clock].
func (c *CPU) Steps() []int { return c.steps }

// Current implements [Clock].
func (c *CPU) Current() (int, error) {
	fastest := 0
	for _, p := range c.found {
		khz, err := c.kHz(p.Name, "scaling_cur_freq")
		if err != nil {
			return 0, err
		}
		fastest = max(fastest, khz)
	}
	return fastest / 1000, nil
}

// Found implements [Clock]: it is the fastest policy's.
func (c *CPU) Found() int {
	lo, hi := c.Limits()
	fastest := 0
	for _, p := range c.found {
		fastest = max(fastest, p.Max/1000)
	}
	return min(max(fastest, lo), hi)
}

// Set implements [Clock].
func (c *CPU) Set(mhz int) error {
	if err := CheckLimits(c, mhz); err != nil {
		return err
	}
	for i, found := range c.found {
		khz := min(max(mhz*1000, c.limits[i].Min), c.limits[i].Max)
		if err := c.limit(Policy{found.Name, min(found.Min, khz), khz}); err != nil {
			return err
		}
	}
	return nil
}

// limit writes the limits of a policy, in such an order that the lowest is never above the highest.
func (c *CPU) limit(p Policy) error {
	now, err := c.kHz(p.Name, "scaling_min_freq")
	if err != nil {
		return err
	}
	writes := []struct {
		file string
		khz  int
	}{{"scaling_max_freq", p.Max}, {"scaling_min_freq", p.Min}}
	if p.Max < now {
		slices.Reverse(writes)
	}
	for _, w := range writes {
		name := path.Join(policyDir, p.Name, w.file)
		if w.file == "scaling_min_freq" && now == p.Min {
			continue
		}
		if err := c.write(name, strconv.Itoa(w.khz)); err != nil {
			return fmt.Errorf("cpufreq: %w", err)
		}
	}
	return nil
}

// Restore implements [Clock].
func (c *CPU) Restore() error {
	var errs []error
	for _, p := range c.found {
		errs = append(errs, c.limit(p))
	}
	return errors.Join(errs...)
}

// Saved implements [Clock].
func (c *CPU) Saved() (Saved, bool) { return Saved{Kind: kindCPU, Policies: c.found}, true }

// RestoreCPU puts the processors' clocks back as a record says. root is as in [OpenCPU]. A record of other
// policies or limits than the hardware's own is refused with [ErrRecord].
func RestoreCPU(root string, r Record) error {
	c := &CPU{root: cmp.Or(root, SysFS)}
	var errs []error
	for _, s := range r.Clocks {
		if s.Kind != kindCPU {
			continue
		}
		for _, p := range s.Policies {
			if !isPolicy(p.Name) {
				errs = append(errs, fmt.Errorf("%w: policy %q", ErrRecord, p.Name))
				continue
			}
			lo, err1 := c.kHz(p.Name, "cpuinfo_min_freq")
			hi, err2 := c.kHz(p.Name, "cpuinfo_max_freq")
			switch err := errors.Join(err1, err2); {
			case err != nil:
			case p.Min < lo || p.Max > hi || p.Min > p.Max:
				err1 = fmt.Errorf("%w: %s from %d to %d kHz, which has %d to %d", ErrRecord, p.Name, p.Min, p.Max, lo, hi)
			default:
				err1 = c.limit(p)
			}
			errs = append(errs, err1, err2)
		}
	}
	return errors.Join(errs...)
}

// openZones finds the counters of the packages; there may be none.
func (c *CPU) openZones() {
	names, err := c.list(capDir)
	if err != nil {
		return
	}
	slices.Sort(names)
	for _, n := range names {
		// intel-rapl:0 is a package, of AMD as well; intel-rapl:0:1 is a part of it.
		if rest, ok := strings.CutPrefix(n, "intel-rapl:"); ok && !strings.Contains(rest, ":") && len(c.zones) < maxPolicies {
			c.zones = append(c.zones, n)
		}
	}
}

// Energy implements [Clock]. The counters wrap after some minutes to hours; what is drawn in between is complete if it
// is asked for more often than that.
func (c *CPU) Energy() (float64, error) {
	if len(c.zones) == 0 {
		return 0, fmt.Errorf("processors: counter of energy: %w", ErrUnsupported)
	}
	now := make([]uint64, len(c.zones))
	var sum uint64
	for i, z := range c.zones {
		var err error
		if now[i], err = c.microjoules(z, "energy_uj"); err != nil {
			return 0, err
		}
		if c.last == nil {
			continue
		}
		if now[i] >= c.last[i] {
			sum += now[i] - c.last[i]
			continue
		}
		wrap, err := c.microjoules(z, "max_energy_range_uj")
		if err != nil {
			return 0, err
		}
		if wrap >= c.last[i] {
			sum += wrap - c.last[i] + now[i]
		}
	}
	c.last = now
	c.joules += float64(sum) / 1e6
	return c.joules, nil
}

func (c *CPU) microjoules(zone, file string) (uint64, error) {
	text, err := c.text(path.Join(capDir, zone, file))
	if err != nil {
		return 0, fmt.Errorf("powercap: %w", err)
	}
	v, err := strconv.ParseUint(text, 10, 53)
	if err != nil {
		return 0, fmt.Errorf("powercap: %s/%s: %w: %.20q", zone, file, ErrUnsupported, text)
	}
	return v, nil
}

func (c *CPU) kHz(policy, file string) (int, error) {
	text, err := c.text(path.Join(policyDir, policy, file))
	if err != nil {
		return 0, fmt.Errorf("cpufreq: %w", err)
	}
	khz, err := strconv.Atoi(text)
	if err != nil || khz < 1 || khz > maxKHz {
		return 0, fmt.Errorf("cpufreq: %s/%s: %w: %.20q is no frequency", policy, file, ErrUnsupported, text)
	}
	return khz, nil
}

// The files are reached through os.Root, so that neither a name nor a link leads out of sysfs.

func (c *CPU) open(name string, flag int) (*os.File, error) {
	root, err := os.OpenRoot(c.root)
	if err != nil {
		return nil, typed(err)
	}
	defer root.Close()
	f, err := root.OpenFile(name, flag|syscall.O_NONBLOCK, 0) // what is no file must not hold us up
	return f, typed(err)
}

func (c *CPU) list(dir string) ([]string, error) {
	f, err := c.open(dir, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(maxEntries)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

func (c *CPU) text(name string) (string, error) {
	f, err := c.open(name, os.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return "", fmt.Errorf("%s: %w: no file", name, ErrUnsupported)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return "", typed(err)
	}
	if len(b) > maxFile {
		return "", fmt.Errorf("%s: %w: more than %d bytes", name, ErrUnsupported, maxFile)
	}
	// It goes into names and messages.
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return ' '
		}
		return r
	}, strings.TrimSpace(string(b))), nil
}

func (c *CPU) write(name, text string) error {
	f, err := c.open(name, os.O_WRONLY|os.O_TRUNC)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	if e := f.Close(); err == nil {
		err = e
	}
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = fmt.Errorf("%s: %w", name, pe.Err)
	}
	return typed(err)
}
