package controller

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// transitions are the changes of state of one machine that tests have seen, or that the package doc lists.
type transitions map[transition]bool

type transition struct{ from, event, to string }

// seen are those of both machines in all tests of this package.
var seen = map[string]transitions{"Recovery": {}, "Reconfiguration": {}}

// step lets a controller step and records what its machines do.
func step(c *Controller, now time.Time, e Event) []Effect {
	recovery, reconf := c.recovery.state, c.reconf.state()
	effects := c.Step(now, e)
	event := strings.TrimPrefix(fmt.Sprintf("%T", e), "controller.")
	if late, ok := e.(Late); ok {
		event = fmt.Sprintf("Late(%v)", late.Timer)
	}
	if c.over {
		return effects
	}
	if to := c.recovery.state; to != recovery {
		seen["Recovery"][transition{recovery.String(), event, to.String()}] = true
	}
	if to := c.reconf.state(); to != reconf {
		seen["Reconfiguration"][transition{reconf.String(), event, to.String()}] = true
	}
	return effects
}

// row is a line of a table: any of the events leads from one state to the other.
type row struct {
	from   string
	events []string
	to     string
}

// tables reads the tables of the package doc.
func tables(t *testing.T) map[string][]row {
	text, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string][]row)
	machine := ""
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "// # "); ok {
			machine = strings.TrimSpace(name)
		} else if text, ok := strings.CutPrefix(line, "//\t"); ok {
			if words := strings.Fields(strings.ReplaceAll(text, ", ", ",")); words[0] != "state" {
				all[machine] = append(all[machine], row{words[0], strings.Split(words[1], ","), words[2]})
			}
		}
	}
	return all
}

// TestTables holds that the machines change their states as the package doc says, and that the stories show every row
// of its tables.
func TestTables(t *testing.T) {
	for _, text := range stories(t) {
		tell(t, text)
	}
	docs := tables(t)
	for machine, all := range seen {
		listed := make(transitions)
		for _, r := range docs[machine] {
			shown := false
			for _, event := range r.events {
				x := transition{r.from, event, r.to}
				listed[x] = true
				shown = shown || all[x]
			}
			if !shown {
				t.Errorf("%s: no story leads from %s to %s", machine, r.from, r.to)
			}
		}
		for x := range all {
			if !listed[x] {
				t.Errorf("%s: the package doc lacks %s --%s--> %s", machine, x.from, x.event, x.to)
			}
		}
	}
}
