package dvfs_test

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/dvfs"
)

// sysfs makes a tree as Linux shows it; files are named below devices/system/cpu/cpufreq, or class/powercap.
func sysfs(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		dir := "devices/system/cpu/cpufreq"
		if strings.HasPrefix(name, "intel-rapl") {
			dir = "class/powercap"
		}
		path := filepath.Join(root, dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func policy(name string, files ...string) map[string]string {
	all := map[string]string{
		"scaling_min_freq": "800000", "scaling_max_freq": "3000000", "cpuinfo_min_freq": "800000", "cpuinfo_max_freq": "3500000",
		"scaling_cur_freq": "2100000", "scaling_driver": "acpi-cpufreq", "scaling_governor": "schedutil",
		"scaling_available_frequencies": "3500000 3000000 2000000 800000",
	}
	for i := 0; i+1 < len(files); i += 2 {
		all[files[i]] = files[i+1]
		if files[i+1] == "" {
			delete(all, files[i])
		}
	}
	out := map[string]string{}
	for file, text := range all {
		out[name+"/"+file] = text
	}
	return out
}

func both(a, b map[string]string) map[string]string {
	for k, v := range b {
		a[k] = v
	}
	return a
}

func read(t *testing.T, root, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, "devices/system/cpu/cpufreq", file))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

func TestCPU(t *testing.T) {
	root := sysfs(t, both(policy("policy0"), policy("policy4", "cpuinfo_max_freq", "2000000", "scaling_max_freq", "2000000",
		"scaling_min_freq", "1000000", "scaling_available_frequencies", "2000000 1000000 900000 800000")))
	c, err := dvfs.OpenCPU(root)
	if err != nil {
		t.Fatal(err)
	}
	if want := []int{800, 900, 1000, 2000, 3000, 3500}; !slices.Equal(c.Steps(), want) {
		t.Errorf("steps %v, want %v", c.Steps(), want)
	}
	if mhz, err := c.Current(); mhz != 2100 || err != nil {
		t.Errorf("runs at %d MHz, %v", mhz, err)
	}
	if got := c.Name(); got != "processors (2 cpufreq policies, driver acpi-cpufreq, governor schedutil)" {
		t.Error(got)
	}
	limits := func() string {
		var all []string
		for _, f := range []string{"policy0/scaling_min_freq", "policy0/scaling_max_freq", "policy4/scaling_min_freq", "policy4/scaling_max_freq"} {
			all = append(all, read(t, root, f))
		}
		return strings.Join(all, " ")
	}
	found := limits()
	for mhz, want := range map[int]string{
		3500: "800000 3500000 1000000 2000000", 900: "800000 900000 900000 900000", 800: "800000 800000 800000 800000",
	} {
		if err := c.Set(mhz); err != nil {
			t.Fatal(err)
		}
		if got := limits(); got != want {
			t.Errorf("at %d MHz: %s, want %s", mhz, got, want)
		}
	}
	for _, mhz := range []int{0, 799, 3501, -1} {
		if err := c.Set(mhz); !errors.Is(err, dvfs.ErrUnsupported) {
			t.Errorf("%d MHz: %v", mhz, err)
		}
	}
	if err := c.Restore(); err != nil || limits() != found {
		t.Errorf("restored to %s, %v, not %s", limits(), err, found)
	}

	// Another process puts it back from the record.
	if err := c.Set(800); err != nil {
		t.Fatal(err)
	}
	saved, _ := c.Saved()
	text, err := json.Marshal(dvfs.Record{Clocks: []dvfs.Saved{saved}})
	if err != nil {
		t.Fatal(err)
	}
	r, err := dvfs.ParseRecord(text)
	if err != nil {
		t.Fatal(err)
	}
	if err := dvfs.RestoreCPU(root, r); err != nil || limits() != found {
		t.Errorf("restored to %s, %v, not %s", limits(), err, found)
	}
	r.Clocks[0].Policies[0].Max = 3_600_000
	if err := dvfs.RestoreCPU(root, r); !errors.Is(err, dvfs.ErrRecord) {
		t.Error(err)
	}
	r.Clocks[0].Policies[0].Name = "../cpufreq/policy0"
	if err := dvfs.RestoreCPU(root, r); !errors.Is(err, dvfs.ErrRecord) {
		t.Error(err)
	}
}

func TestCPUIsThereOrNot(t *testing.T) {
	long := strings.Repeat("9", 20<<10)
	for name, c := range map[string]struct {
		files map[string]string
		want  error
	}{
		"no cpufreq":           {nil, dvfs.ErrUnsupported},
		"no policies":          {map[string]string{"boost": "1"}, dvfs.ErrUnsupported},
		"powersave":            {policy("policy0", "scaling_governor", "powersave"), dvfs.ErrUnsupported},
		"userspace":            {policy("policy0", "scaling_governor", "userspace"), dvfs.ErrUnsupported},
		"powersave of Intel":   {policy("policy0", "scaling_governor", "powersave", "scaling_driver", "intel_pstate"), nil},
		"no list":              {policy("policy0", "scaling_available_frequencies", ""), nil},
		"no driver's name":     {policy("policy0", "scaling_driver", "", "scaling_governor", ""), nil},
		"no limit":             {policy("policy0", "cpuinfo_max_freq", ""), dvfs.ErrUnsupported},
		"limit is text":        {policy("policy0", "cpuinfo_max_freq", "\x1b[31mfast"), dvfs.ErrUnsupported},
		"limit is negative":    {policy("policy0", "cpuinfo_min_freq", "-5"), dvfs.ErrUnsupported},
		"limit is enormous":    {policy("policy0", "cpuinfo_max_freq", "99999999999999999999"), dvfs.ErrUnsupported},
		"limits are crossed":   {policy("policy0", "scaling_min_freq", "3500000"), dvfs.ErrUnsupported},
		"file is long":         {policy("policy0", "scaling_max_freq", long), dvfs.ErrUnsupported},
		"list is wrong":        {policy("policy0", "scaling_available_frequencies", "1000000 x"), dvfs.ErrUnsupported},
		"folder where it was":  {policy("policy0", "scaling_max_freq", "", "scaling_max_freq/x", "1"), dvfs.ErrUnsupported},
		"policy of other name": {policy("policyX"), dvfs.ErrUnsupported},
	} {
		t.Run(name, func(t *testing.T) {
			clock, err := dvfs.OpenCPU(sysfs(t, c.files))
			if !errors.Is(err, c.want) {
				t.Fatalf("error %v, want %v", err, c.want)
			}
			if err != nil && strings.ContainsAny(err.Error(), "\n\x1b") {
				t.Errorf("not one plain line: %q", err)
			}
			if err == nil {
				lo, hi := clock.Limits()
				if s := clock.Steps(); s[0] != lo || s[len(s)-1] != hi || !slices.IsSorted(s) {
					t.Errorf("steps %v in limits %d to %d", s, lo, hi)
				}
			}
		})
	}
}

func TestCPULinkOutOfSysFS(t *testing.T) {
	root := sysfs(t, policy("policy0"))
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("1000000"), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, "devices/system/cpu/cpufreq/policy0/scaling_max_freq")
	if err := errors.Join(os.Remove(file), os.Symlink(secret, file)); err != nil {
		t.Fatal(err)
	}
	if c, err := dvfs.OpenCPU(root); err == nil {
		t.Errorf("%s was opened through a link to %s", c.Name(), secret)
	}
}

func TestCPUWithoutPermission(t *testing.T) {
	root := sysfs(t, both(policy("policy0"), map[string]string{"intel-rapl:0/energy_uj": "5"}))
	c, err := dvfs.OpenCPU(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"devices/system/cpu/cpufreq/policy0/scaling_max_freq", "class/powercap/intel-rapl:0/energy_uj"} {
		mode := os.FileMode(0o444)
		if strings.HasSuffix(f, "energy_uj") {
			mode = 0o400
		}
		if err := os.Chmod(filepath.Join(root, f), mode); err != nil {
			t.Fatal(err)
		}
	}
	// In a goroutine of its own, since its thread may be another user's and then ends with it.
	t.Run("nobody", func(t *testing.T) {
		if os.Getuid() == 0 { // who may do everything: this thread looks at files as nobody
			runtime.LockOSThread() // and not unlocked
			if err := os.Chmod(filepath.Dir(root), 0o755); err != nil {
				t.Fatal(err)
			}
			for dir := root; dir != "/"; dir = filepath.Dir(dir) {
				if info, err := os.Stat(dir); err != nil || info.Mode()&0o5 != 0o5 {
					t.Skipf("others may not look into %s", dir)
				}
			}
			if err := readAsNobody(); err != nil {
				t.Skip(err)
			}
		}
		if err := c.Set(2000); !errors.Is(err, dvfs.ErrPermission) {
			t.Errorf("set: %v", err)
		}
		if os.Getuid() == 0 {
			if _, err := c.Energy(); !errors.Is(err, dvfs.ErrPermission) {
				t.Errorf("energy: %v", err)
			}
		}
	})
}

func TestCPUEnergyWraps(t *testing.T) {
	root := sysfs(t, both(policy("policy0"), map[string]string{
		"intel-rapl:0/energy_uj": "4000000", "intel-rapl:0/max_energy_range_uj": "5000000",
		"intel-rapl:1/energy_uj": "0", "intel-rapl:1/max_energy_range_uj": "5000000",
		"intel-rapl:0:0/energy_uj": "77000000",
	}))
	c, err := dvfs.OpenCPU(root)
	if err != nil {
		t.Fatal(err)
	}
	set := func(zone string, uj int) {
		if err := os.WriteFile(filepath.Join(root, "class/powercap", zone, "energy_uj"), []byte(strconv.Itoa(uj)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	at := func() float64 {
		j, err := c.Energy()
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	first := at()
	set("intel-rapl:0", 4_500_000)
	set("intel-rapl:1", 2_000_000)
	if got := at() - first; got != 2.5 {
		t.Errorf("drew %v J, want 2.5", got)
	}
	set("intel-rapl:0", 500_000) // wrapped
	if got := at() - first; got != 3.5 {
		t.Errorf("drew %v J, want 3.5", got)
	}
}

func TestEmulated(t *testing.T) {
	e, err := dvfs.NewEmulated(dvfs.EmulatedConfig{Steps: []int{500, 1000}, Power: dvfs.Cubic{Static: 40, Dynamic: 60, Max: 1000}})
	if err != nil {
		t.Fatal(err)
	}
	if e.Run(1, 1); e.Set(500) != nil {
		t.Fatal("not set")
	}
	e.Run(2, 0)
	if j, err := e.Energy(); err != nil || math.Abs(j-(100+40+2*47.5)) > 1e-9 {
		t.Errorf("drew %v J, %v", j, err)
	}
	if err := e.Set(1001); !errors.Is(err, dvfs.ErrUnsupported) {
		t.Error(err)
	}
	if mhz, _ := e.Current(); e.Restore() != nil || mhz != 500 {
		t.Error(mhz)
	}
	for _, cfg := range []dvfs.EmulatedConfig{{}, {Steps: []int{2, 1}}, {Steps: []int{0}}, {Steps: []int{5}, Start: 6}} {
		if _, err := dvfs.NewEmulated(cfg); err == nil {
			t.Errorf("%+v was taken", cfg)
		}
	}
}

// lasting is an emulated clock that would stay as it is.
type lasting struct {
	*dvfs.Emulated
	broken bool
}

func (l *lasting) Saved() (dvfs.Saved, bool) { return dvfs.Saved{Kind: "nvml", ID: "GPU-1"}, true }

func (l *lasting) Restore() error {
	if l.broken {
		return dvfs.ErrPermission
	}
	return l.Emulated.Restore()
}

func TestKeeper(t *testing.T) {
	var clocks []dvfs.Clock
	for range 3 {
		e, err := dvfs.NewEmulated(dvfs.EmulatedConfig{Steps: []int{500, 1000}, Start: 1000})
		if err != nil {
			t.Fatal(err)
		}
		clocks = append(clocks, &lasting{Emulated: e})
	}
	saves, full := 0, errors.New("disk full")
	k := dvfs.NewKeeper(clocks, func(r dvfs.Record) error {
		if mhz, _ := clocks[0].Current(); mhz != 1000 || len(r.Clocks) != 3 {
			t.Errorf("recorded %v at %d MHz", r, mhz)
		}
		if saves++; saves == 1 {
			return full
		}
		return nil
	})
	if err := k.Apply([]dvfs.Setting{{Clock: 0, MHz: 500}}); !errors.Is(err, full) || k.Touched() {
		t.Errorf("set without a record: %v", err)
	}
	if err := k.Apply([]dvfs.Setting{{Clock: 0, MHz: 500}, {Clock: 2, MHz: 500}, {Clock: 0, MHz: 0}}); err != nil || saves != 2 || !k.Touched() {
		t.Errorf("%v, %d records", err, saves)
	}
	clocks[2].(*lasting).broken = true
	if err := k.Close(); !errors.Is(err, dvfs.ErrPermission) || !k.Touched() {
		t.Error(err)
	}
	clocks[2].(*lasting).broken = false
	if err := k.Close(); err != nil || k.Touched() {
		t.Error(err)
	}
	for i, c := range clocks {
		if mhz, _ := c.Current(); mhz != 1000 {
			t.Errorf("clock %d was left at %d MHz", i, mhz)
		}
	}
}

func FuzzParseRecord(f *testing.F) {
	f.Add([]byte(`{"clocks":[{"kind":"cpufreq","id":"","policies":[{"name":"policy0","min":1,"max":2}]},{"kind":"nvml","id":"GPU-1"}]}`))
	f.Add([]byte(`{"clocks":[{"kind":"nvml","id":"\n"}]}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := dvfs.ParseRecord(text)
		if err != nil {
			if !errors.Is(err, dvfs.ErrRecord) {
				t.Error(err)
			}
			return
		}
		again, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := dvfs.ParseRecord(again); err != nil {
			t.Errorf("%s: %v", again, err)
		}
	})
}
