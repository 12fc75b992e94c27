package cli

import (
	"io"
	"os"

	"golang.org/x/term"

	"github.com/soliton-train/soliton/internal/observe/view"
)

// Cleaned is a writer that shows text by [view.Clean]: what programs have written must not control a terminal.
type Cleaned struct{ Raw io.Writer }

func (c Cleaned) Write(b []byte) (int, error) {
	if _, err := io.WriteString(c.Raw, view.Clean(string(b))); err != nil {
		return 0, Fail(err) // a full disk is no wrong usage
	}
	return len(b), nil
}

// Raw returns the writer behind a Cleaned one.
func Raw(w io.Writer) io.Writer {
	if c, ok := w.(Cleaned); ok {
		return c.Raw
	}
	return w
}

// Terminal returns the terminal that a writer writes to, if it does.
func Terminal(w io.Writer) (f *os.File, ok bool) {
	f, ok = Raw(w).(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd()))
}
