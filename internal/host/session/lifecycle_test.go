package session

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

// tables returns the transitions that the package doc lists, by the title of their table.
func tables(t *testing.T) map[string][]string {
	text, err := os.ReadFile("session.go")
	if err != nil {
		t.Fatal(err)
	}
	all, title := make(map[string][]string), ""
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "// # "); ok {
			title = strings.TrimSpace(name)
		} else if row, ok := strings.CutPrefix(line, "//\t"); ok && title != "" {
			if words := strings.Fields(row); words[0] != "state" {
				all[title] = append(all[title], words[0]+" "+words[1])
			}
		}
	}
	return all
}

func transitions[S interface {
	cmp.Ordered
	fmt.Stringer
}](table map[S][]S) (all []string) {
	for _, from := range slices.Sorted(maps.Keys(table)) {
		for _, to := range table[from] {
			all = append(all, from.String()+" "+to.String())
		}
	}
	return all
}

func TestTables(t *testing.T) {
	doc := tables(t)
	for title, want := range map[string][]string{"Run": transitions(phases), "Worker": transitions(workerStates), "Process": transitions(exitStates)} {
		if got := doc[title]; !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
			t.Errorf("%s: the package doc lists\n%v\nand the code\n%v", title, got, want)
		}
	}
}
