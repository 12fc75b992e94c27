package inspect

import (
	"errors"
	"fmt"
	"strings"

	"github.com/soliton-train/soliton/internal/dvfs"
	"github.com/soliton-train/soliton/internal/dvfs/nvml"
	"github.com/soliton-train/soliton/launcher/internal/clocks"
)

// checkLeftClocks puts back what a launcher that was killed has left.
func checkLeftClocks(sysfs string) Finding {
	f := Finding{"clocks", ok, "none is left as a run had set it", ""}
	switch said, err := clocks.Restore(sysfs, false); {
	case err != nil:
		f.Mark, f.Found, f.Advice = warn, oneLine(err.Error()), "root may restore clocks: run launcher doctor as root, or restart the machine"
	case said != "":
		f.Found = said
	}
	return f
}

// oneLine makes one line of an error of several.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// checkCPUClock looks for cpufreq. Nothing is set.
func checkCPUClock(root string) Finding {
	const check = "processor clock"
	c, err := dvfs.OpenCPU(root)
	if err != nil {
		return Finding{check, ok, err.Error(), ""} // nothing is wrong with a machine that has none
	}
	return Finding{check, ok, describe(c), ""}
}

// checkCards names the graphics cards. Nothing is set.
func checkCards(lib *nvml.Library, err error) []Finding {
	const check = "graphics card"
	if errors.Is(err, dvfs.ErrUnsupported) {
		return []Finding{{check, ok, err.Error(), ""}}
	}
	if err != nil {
		return []Finding{{check, warn, err.Error(), "the driver is there, but does not answer: nvidia-smi may say more"}}
	}
	defer lib.Close()
	var all []Finding
	for _, c := range lib.Cards() {
		f := Finding{check, ok, describe(c), ""}
		if now, limit, err := c.Watts(); err == nil {
			f.Found += fmt.Sprintf(", draws %.0f W of at most %.0f W", now, limit)
		}
		if v := lib.Driver(); v != "" {
			f.Found += ", driver " + v
		}
		all = append(all, f)
	}
	return all
}

// describe says in a line what a clock is and does.
func describe(c dvfs.Clock) string {
	lo, hi := c.Limits()
	text := c.Name()
	if mhz, err := c.Current(); err == nil {
		text += fmt.Sprintf(" at %d MHz", mhz)
	}
	text += fmt.Sprintf(", %d to %d MHz in %d steps", lo, hi, len(c.Steps()))
	joules, err := c.Energy()
	switch {
	case err == nil:
		text += fmt.Sprintf(", counter of energy at %.0f J", joules)
	case errors.Is(err, dvfs.ErrPermission):
		text += ", counter of energy for root only"
	default:
		text += ", no counter of energy"
	}
	return text
}
