package view

// Tee returns a view that hands everything to all of views, in their order. There is at least one.
func Tee(views ...View) View {
	if len(views) == 1 {
		return views[0]
	}
	return tee(views)
}

type tee []View

func (t tee) Show(e Event) {
	for _, v := range t {
		v.Show(e)
	}
}

func (t tee) Close() {
	for _, v := range t {
		v.Close()
	}
}
