package slurm

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// MaxNodes bounds a list of nodes.
const MaxNodes = 1 << 16

// errNodes means that a list is none of nodes.
var errNodes = errors.New("a list of nodes such as n[01-03,7],m1")

// Nodes returns the names in a list as Slurm writes it, such as rack[1-2]n[01-16],login: numbers keep the zeros in front. With several
// brackets in a name, the last one counts fastest. More than [MaxNodes] names are an error.
func Nodes(list string) ([]string, error) {
	var all []string
	for list != "" {
		var word string
		var err error
		if word, list, err = cutWord(list); err != nil {
			return nil, err
		}
		names := []string{""}
		for word != "" {
			before, rest, bracket := strings.Cut(word, "[")
			parts := []string{""}
			word = ""
			if bracket {
				inside, after, closed := strings.Cut(rest, "]")
				if !closed {
					return nil, fmt.Errorf("slurm: %.80q is not %w", rest, errNodes)
				}
				if parts, err = numbers(inside); err != nil {
					return nil, err
				}
				word = after
			}
			if strings.ContainsAny(before, "]") || len(names)*len(parts) > MaxNodes-len(all) {
				return nil, fmt.Errorf("slurm: %.80q is not %w, of at most %d", before, errNodes, MaxNodes)
			}
			next := make([]string, 0, len(names)*len(parts))
			for _, name := range names {
				for _, part := range parts {
					next = append(next, name+before+part)
				}
			}
			names = next
			if len(names[0]) > maxName {
				return nil, fmt.Errorf("slurm: %.80q is not %w", names[0], errNodes)
			}
		}
		all = append(all, names...)
	}
	if len(all) == 0 || len(all) > MaxNodes {
		return nil, fmt.Errorf("slurm: %d names are not %w", len(all), errNodes)
	}
	return all, nil
}

// maxName bounds the name of a node, in bytes.
const maxName = 255

// cutWord returns what is before the first comma outside of brackets.
func cutWord(list string) (word, rest string, err error) {
	inside := false
	for i := range len(list) {
		switch c := list[i]; {
		case c == '[' && !inside:
			inside = true
		case c == ']' && inside:
			inside = false
		case c == '[' || c == ']' || c <= ' ' || c > '~':
			return "", "", fmt.Errorf("slurm: %.80q is not %w", list, errNodes)
		case c == ',' && !inside:
			if i == 0 || i == len(list)-1 {
				return "", "", fmt.Errorf("slurm: %.80q is not %w", list, errNodes)
			}
			return list[:i], list[i+1:], nil
		}
	}
	if inside {
		return "", "", fmt.Errorf("slurm: %.80q is not %w", list, errNodes)
	}
	return list, "", nil
}

// numbers returns those of ranges such as 01-03,7.
func numbers(ranges string) (all []string, err error) {
	for r := range strings.SplitSeq(ranges, ",") {
		low, high, isRange := strings.Cut(r, "-")
		if !isRange {
			high = low
		}
		first, err := number(low)
		if err != nil {
			return nil, err
		}
		last, err := number(high)
		if err != nil {
			return nil, err
		}
		if last < first || last-first >= uint64(MaxNodes-len(all)) {
			return nil, fmt.Errorf("slurm: [%.80s] is not in %w, of at most %d", r, errNodes, MaxNodes)
		}
		for n := first; n <= last; n++ {
			all = append(all, fmt.Sprintf("%0*d", len(low), n))
		}
	}
	return all, nil
}

// number reads a number of at most 18 digits.
func number(text string) (uint64, error) {
	const digits = 18
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || len(text) > digits || text[0] == '+' {
		return 0, fmt.Errorf("slurm: %.80q is not a number in %w", text, errNodes)
	}
	return n, nil
}
