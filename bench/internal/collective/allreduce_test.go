package collective

import (
	"fmt"
	"os"
	"testing"

	"github.com/soliton-train/soliton/internal/net/group"
)

// TestMain lets the ranks that a crew starts be this binary.
func TestMain(m *testing.M) {
	if len(os.Args) > 3 && os.Args[1] == "allreduce" && os.Args[3] == "rank" {
		if err := AllReduce(os.Args[2:], nil); err != nil {
			fmt.Fprintln(os.Stderr, "rank:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// Ranks meet over each kind of links, or as a ring, come to the right sums, and end when their input does.
func TestCrew(t *testing.T) {
	for _, links := range []string{"host", "sockets", "tcp", "loopback"} {
		c, err := startCrew(3, links, t.TempDir(), group.Auto)
		if err != nil {
			t.Fatalf("%s: %v", links, err)
		}
		for _, elements := range []int{1, 1000, 100000} {
			ms, err := c.ask(elements, 2, 3)
			if err != nil || len(ms) != 2 || ms[0] <= 0 || ms[1] <= 0 {
				t.Errorf("%s, %d elements: %v %v", links, elements, ms, err)
			}
		}
		c.close()
	}
}

func TestNumbers(t *testing.T) {
	if x, err := numbers("2,4", 2, 8); err != nil || len(x) != 2 || x[1] != 4 {
		t.Errorf("%v %v", x, err)
	}
	for _, list := range []string{"", "1", "9", "2,,4", "x"} {
		if _, err := numbers(list, 2, 8); err == nil {
			t.Errorf("%q is accepted", list)
		}
	}
}
