// Package change says how two descriptions of a job differ: [First] for those of two workers, which must be the same, and [Resumed] for
// that of a run and of what it is to be from now on, of which the user may allow most.
package change

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// aspect is something of a job that may be another one when a run is resumed.
type aspect struct {
	name string
	need need
	text func(rundir.Job) string // what is compared, in words for people
}

// need is what it takes to change an aspect.
type need uint8

const (
	free  need = iota // the user changes it by its own flag, or no number follows from it
	asked             // --allow has to name it
	never             // the state could not continue
)

// aspects are in the order in which they are told. Together they have all that is in the ID of a job.
var aspects = []aspect{
	{"layers", never, func(j rundir.Job) string { return fmt.Sprintf("%d with %d parameters", j.Layers, j.Parameters) }},
	{"optimizer", never, func(j rundir.Job) string { kind, _, _ := strings.Cut(j.Optimizer, "("); return kind }},
	{"optimizer", never, func(j rundir.Job) string { return fmt.Sprintf("%d updates before the run", j.InitUpdates) }},
	{"program", asked, func(j rundir.Job) string {
		return strings.Join([]string{j.Program, cmp.Or(j.ProgramSHA256, "unknown"), j.GoVersion}, " ")
	}},
	{"program", asked, func(j rundir.Job) string { return config(j, true) }},
	{"model", asked, func(j rundir.Job) string { return j.Model }},
	{"model", asked, func(j rundir.Job) string { return config(j, false) }},
	{"data", asked, func(j rundir.Job) string { return fmt.Sprintf("%d samples %s", j.Samples, j.DataSHA256) }},
	{"data", asked, func(j rundir.Job) string { return j.EvalSHA256 }},
	{"lr", asked, func(j rundir.Job) string { return peak.FindString(j.Schedule) }},
	{"schedule", asked, func(j rundir.Job) string { return peak.ReplaceAllString(j.Schedule, "") }},
	{"optimizer", asked, func(j rundir.Job) string { return j.Optimizer }},
	{"clip", asked, func(j rundir.Job) string { return number(j.ClipNorm) }},
	{"batch", asked, func(j rundir.Job) string { return fmt.Sprintf("%d by %d", j.GlobalBatch, j.MicroBatch) }},
	{"seed", asked, func(j rundir.Job) string { return strconv.FormatUint(j.Seed, 10) }},
	{"init", asked, func(j rundir.Job) string { return strings.TrimSpace(j.InitSHA256 + " " + j.InitOptimizerSHA256) }},
	{"steps", free, func(j rundir.Job) string { return strconv.Itoa(j.Steps) }},
	{"eval", free, func(j rundir.Job) string { return fmt.Sprintf("%d samples every %d steps", j.EvalSamples, j.EvalEvery) }},
	{"flags", free, func(j rundir.Job) string { return strings.Join(j.Args, " ") }},
	{"platform", free, func(j rundir.Job) string { return j.Platform }},
}

// peak is the peak learning rate in the description of a schedule.
var peak = regexp.MustCompile(`\bpeak=[^,)]*`)

// Names are what --allow can name.
func Names() (names []string) {
	for _, a := range aspects {
		if a.need == asked && !slices.Contains(names, a.name) {
			names = append(names, a.name)
		}
	}
	return names
}

// Check reports a name that --allow cannot have.
func Check(allow []string) error {
	var errs faults.List
	for i, name := range allow {
		errs.If(!slices.Contains(Names(), name) && !slices.Contains(allow[:i], name), "--allow %s: give some of %s", faults.Value(name), strings.Join(Names(), ","))
	}
	return errs.Err()
}

// Between returns what differs.
func Between(was, is rundir.Job) (all []rundir.Change) {
	for _, a := range aspects {
		if x, y := a.text(was), a.text(is); x != y && !slices.ContainsFunc(all, func(c rundir.Change) bool { return c.Name == a.name }) {
			x, y = otherKeys(x, y)
			all = append(all, rundir.Change{Name: a.name, Was: lessOf(x), Is: lessOf(y)})
		}
	}
	return all
}

// OtherFile names the first file of the data whose content is another one, "" for none. It may lie elsewhere.
func OtherFile(was, is []rundir.DataFile) string {
	for i := range max(len(was), len(is)) {
		switch {
		case i >= len(was):
			return oneLine(is[i].Path)
		case i >= len(is) || was[i].Size != is[i].Size || was[i].SHA256 != is[i].SHA256:
			return oneLine(was[i].Path)
		}
	}
	return ""
}

// Refusal is why a run cannot be resumed as what it is to be.
type Refusal struct {
	Changes []rundir.Change // that are not allowed
	Never   bool            // and cannot be
}

func (r *Refusal) Error() string {
	var texts, names []string
	for _, c := range r.Changes {
		texts, names = append(texts, c.String()), append(names, c.Name)
	}
	text := "the run cannot be resumed with what has changed: " + strings.Join(texts, "; ")
	if r.Never {
		return text + "; its state has another shape"
	}
	return text + "; if that is meant, give --allow " + strings.Join(names, ",")
}

// Allowed returns a *Refusal if something differs that may not.
func Allowed(was, is rundir.Job, allow []string) error {
	var no Refusal
	for _, c := range Between(was, is) {
		need := free
		for _, a := range aspects {
			if a.name == c.Name && a.text(was) != a.text(is) {
				need = max(need, a.need)
			}
		}
		if need == never && !no.Never {
			no = Refusal{Never: true}
		}
		if need == never || need == asked && !no.Never && !slices.Contains(allow, c.Name) {
			no.Changes = append(no.Changes, c)
		}
	}
	if no.Changes == nil {
		return nil
	}
	return &no
}

// softwareKeys are those of the configuration of a PyTorch model that say with what it is computed.
var softwareKeys = []string{"torch", "python", "machine", "cpu", "blas", "threads", "device", "source_sha256", "first_sha256", "probe_sha256"}

// config returns the part of a model's configuration that says with what it is computed, or the rest.
func config(j rundir.Job, software bool) string {
	var all map[string]json.RawMessage
	if json.Unmarshal(j.ModelConfig, &all) != nil || all["torch"] == nil || all["source_sha256"] == nil {
		if software {
			return ""
		}
		return string(j.Plain().ModelConfig)
	}
	for key := range all {
		if slices.Contains(softwareKeys, key) != software {
			delete(all, key)
		}
	}
	text, err := json.Marshal(all) // sorted by key
	if err != nil {
		return string(bytes.TrimSpace(j.ModelConfig))
	}
	return string(text)
}

func number(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }

// otherKeys leaves out of two JSON objects what they have in common.
func otherKeys(x, y string) (string, string) {
	var a, b map[string]json.RawMessage
	if json.Unmarshal([]byte(x), &a) != nil || json.Unmarshal([]byte(y), &b) != nil {
		return x, y
	}
	for key, value := range a {
		if other, ok := b[key]; ok && bytes.Equal(value, other) {
			delete(a, key)
			delete(b, key)
		}
	}
	left, err := json.Marshal(a)
	right, err2 := json.Marshal(b)
	if err != nil || err2 != nil {
		return x, y
	}
	return string(left), string(right)
}

// longest is how much of a value is told, in bytes.
const longest = 300

// digest is a SHA-256, of which people want to see the beginning.
var digest = regexp.MustCompile(`\b([0-9a-f]{12})[0-9a-f]{52}\b`)

func lessOf(text string) string {
	text = digest.ReplaceAllString(oneLine(text), "$1…")
	if text == "" {
		return "none"
	}
	if len(text) > longest {
		return strings.ToValidUTF8(text[:longest], "") + "…"
	}
	return text
}

// oneLine makes a line of a text that should have been one.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
